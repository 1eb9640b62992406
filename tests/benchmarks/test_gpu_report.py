"""The report for strangers with GPUs, rehearsed with gloo on CPUs, by a small model."""

import json
import sys
from unittest import mock

import gin
import torch

from benchmarks.gpu_check.parts import PARTS, REPOSITORY
from benchmarks.gpu_report import __main__ as command
from benchmarks.gpu_report import training
from benchmarks.harness import Record
from tests.process_pool import ProcessPool

SMALL = {
    "NetworkArgs.num_layers": 1,
    "NetworkArgs.hidden_size": 16,
    "NetworkArgs.num_attention_heads": 2,
    "NetworkArgs.kv_channels": 8,
}


def _train() -> Record:
    """Trains in this rank of a pool as the command does, but a small model."""
    parse = training.parse_config

    def parse_small(model):
        make_task = parse(model)
        for name, value in SMALL.items():
            gin.bind_parameter(name, value)
        return make_task

    with mock.patch.object(training, "parse_config", parse_small), gin.unlock_config():
        return training.train(torch.device("cpu"))


def test_a_rehearsal_writes_the_whole_report(tmp_path, monkeypatch, capsys):
    pool, file = ProcessPool(2), tmp_path / "report.json"
    monkeypatch.setattr(command, "run_on_ranks", lambda ranks, function: pool.run(_train)[0])
    monkeypatch.setattr(sys, "argv", ["gpu_report", str(file)])
    command.main()
    pool.close()
    assert f"A rehearsal without GPUs. Report in {file}" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["is_rehearsal"] and len(report["check"]) == len(PARTS)
    figures = report["training"]
    assert figures["backend"] and figures["steps"] == 2
    assert figures["imbalance"]["on"]["median"] < figures["imbalance"]["off"]["median"]
    assert figures["max_relative_loss_difference"]["off again"] == 0
    assert figures["max_relative_loss_difference"]["on"] < 1e-4
    template = REPOSITORY / ".github" / "ISSUE_TEMPLATE" / "gpu-report.md"
    assert "out/gpu-report.json" in template.read_text()
