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


@pytest.fixture(scope="module")
def predicted() -> dict[str, Any]:
    """By model."""
    files = [f"benchmarks/demo/{model}.gin" for model in MODELS]
    command = [sys.executable, "-m", "tests.commons.advisor.gin_runs", *files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=True)
    decoder, reports, rest = json.JSONDecoder(), {}, done.stdout
    for model in MODELS:
        reports[model], end = decoder.raw_decode(rest)
        rest = rest[end:].lstrip()
    return reports


@pytest.mark.parametrize("model", MODELS)
def test_the_demo_is_predicted_within_a_tenth(model: str, predicted: dict[str, Any]):
    summary = json.loads((REPOSITORY / "benchmarks/results/demo" / model / "summary.json").read_text())
    measured = summary["balanced"]["refined, all_to_all"]
    (case,) = predicted[model]["cases"]
    assert case["rows_per_rank"] == {"hstu": 16, "sid_gr": 12}[model]
    refined = by_name(case)["refined"]
    assert refined["speedup"] == pytest.approx(measured["speedup"], rel=0.1)
    assert refined["bytes_sent_per_rank"] == pytest.approx(measured["bytes_sent_per_step"], rel=0.1)
