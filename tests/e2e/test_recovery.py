"""Jobs that are killed, terminated, or cannot write go on under torchrun, or end with a clear cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.gin_files import RANDOM_DATA
from tests.e2e.torchrun import torchrun

NUM_STEPS = 9
SETTINGS = f"""
TrainerArgs.max_train_iters = {NUM_STEPS}
TrainerArgs.enable_balanced_shuffler = True
TrainerArgs.ckpt_save_interval = 2
TrainerArgs.ckpt_save_dir = "checkpoints"
NetworkArgs.hidden_dropout = 0.2
"""


def _run(directory: Path, failure: str, restarts: int = 0) -> tuple[str, list[tuple[int, float]]]:
    """What the job printed, and the loss of each step that it ran, in the order of running."""
    config = directory / "config.gin"
    config.write_text(RANDOM_DATA + SETTINGS)
    arguments = ("-m", "tests.e2e.failing_rank", config, failure)
    output = torchrun(directory, *arguments, restarts=restarts, timeout=120.0)
    log = (directory / "logs/train.jsonl").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    return output, [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    _, steps = _run(tmp_path_factory.mktemp("uninterrupted"), "none")
    assert [step for step, _ in steps] == list(range(1, NUM_STEPS + 1))
    return steps


def _checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


@pytest.mark.parametrize("failure", ["exchange", "writing"])
def test_a_killed_rank_means_a_resumed_run(tmp_path, uninterrupted, failure):
    output, steps = _run(tmp_path, failure, restarts=1)
    assert "training resumes from checkpoints/step_" in output or failure == "writing"
    assert dict(steps) == dict(uninterrupted)  # also those that ran twice
    again = [step for step, _ in steps]
    assert again[-1] == NUM_STEPS and len(again) > NUM_STEPS
    resumed = next(i for i in range(1, len(again)) if again[i] <= again[i - 1])
    assert again[resumed:] == list(range(again[resumed], NUM_STEPS + 1))
    assert _checkpoints(tmp_path) == ["step_2", "step_4", "step_6", "step_8", "step_9"]


def test_a_terminated_job_saves_ends_and_goes_on_when_started_again(tmp_path, uninterrupted):
    output, steps = _run(tmp_path, "terminated")
    stopped = steps[-1][0]
    assert 4 <= stopped < NUM_STEPS and f"stopped after step {stopped}, as SIGTERM requested" in output
    assert f"step_{stopped}" in _checkpoints(tmp_path)
    output, steps = _run(tmp_path, "none")
    assert f"training resumes from checkpoints/step_{stopped}" in output
    assert steps == uninterrupted


def test_a_disk_that_is_full_costs_checkpoints_and_figures_and_not_the_training(tmp_path, uninterrupted):
    output, steps = _run(tmp_path, "disk")
    assert steps == uninterrupted
    assert "the checkpoint of step 2 was not written" in output and "File too large" in output
    assert output.count("figures are no longer written to logs/tensorboard") == 1
    assert not [name for name in _checkpoints(tmp_path) if not name.endswith(".unfinished")]
