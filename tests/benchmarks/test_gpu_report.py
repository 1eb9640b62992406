"""The report for strangers with GPUs, rehearsed with gloo on CPUs."""

import json

from benchmarks.gpu_check.parts import PARTS, REPOSITORY
from tests.e2e.torchrun import python


def test_a_rehearsal_writes_the_whole_report(tmp_path):
    file = tmp_path / "report.json"
    printed = python(REPOSITORY, "-m", "benchmarks.gpu_report", file)
    assert f"A rehearsal without GPUs. Report in {file}" in printed
    report = json.loads(file.read_text())
    assert report["is_rehearsal"] and len(report["check"]) == len(PARTS) - 1
    training = report["training"]
    assert training["backend"] and training["steps"] == 2
    assert training["imbalance"]["on"]["median"] < training["imbalance"]["off"]["median"]
    assert training["max_relative_loss_difference"]["off again"] == 0
    assert training["max_relative_loss_difference"]["on"] < 1e-4
    template = REPOSITORY / ".github" / "ISSUE_TEMPLATE" / "gpu-report.md"
    assert "out/gpu-report.json" in template.read_text()
