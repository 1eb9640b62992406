"""What is predicted for the demo, whose speedup was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commons.advisor.command import by_name

REPOSITORY = Path(__file__).parents[3]
MODELS = ("hstu", "sid_gr")
WITHOUT_DATASET = """
TrainerArgs.train_batch_size = 8
NetworkArgs.num_layers = 2
NetworkArgs.hidden_size = 32
NetworkArgs.num_attention_heads = 2
NetworkArgs.kv_channels = 16
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The demo's files, and one that has no dataset."""
    incomplete = tmp_path_factory.mktemp("gin") / "incomplete.gin"
    incomplete.write_text(WITHOUT_DATASET)
    files = [*(f"benchmarks/demo/{model}.gin" for model in MODELS), str(incomplete)]
    command = [sys.executable, "-m", "tests.commons.advisor.gin_runs", *files]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=True)


@pytest.fixture(scope="module")
def predicted(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """By model."""
    decoder, reports, rest = json.JSONDecoder(), {}, ran.stdout
    for model in MODELS:
        reports[model], end = decoder.raw_decode(rest)
        rest = rest[end:].lstrip()
    assert not rest
    return reports


def test_a_gin_file_without_a_dataset_is_named_in_one_line(ran: subprocess.CompletedProcess[str]):
    (line,) = (line for line in ran.stderr.splitlines() if "incomplete.gin" in line)
    assert line.startswith("balance-advisor: error: ") and "has no dataset; expected" in line


@pytest.mark.parametrize("model", MODELS)
def test_the_demo_is_predicted_within_a_tenth(model: str, predicted: dict[str, Any]):
    summary = json.loads((REPOSITORY / "benchmarks/results/demo" / model / "summary.json").read_text())
    measured = summary["balanced"]["refined, all_to_all"]
    (case,) = predicted[model]["cases"]
    assert case["rows_per_rank"] == {"hstu": 16, "sid_gr": 12}[model]
    refined = by_name(case)["refined"]
    assert refined["speedup"] == pytest.approx(measured["speedup"], rel=0.1)
    assert refined["bytes_sent_per_rank"] == pytest.approx(measured["bytes_sent_per_step"], rel=0.1)
