"""A job that is killed or terminated, or that cannot write, goes on under torchrun."""

from pathlib import Path

import pytest

from tests.e2e.gin_files import RANDOM_DATA
from tests.e2e.torchrun import RANKING, torchrun, train_log

NUM_STEPS = 9
SETTINGS = f"""
TrainerArgs.max_train_iters = {NUM_STEPS}
TrainerArgs.enable_balanced_shuffler = True
TrainerArgs.ckpt_save_interval = 2
TrainerArgs.ckpt_save_dir = "checkpoints"
NetworkArgs.hidden_dropout = 0.2
"""

Losses = list[tuple[int, float]]  # by step, in the order they were trained


def _run(directory: Path, failure: str, restarts: int = 0, settings: str = SETTINGS) -> tuple[str, Losses]:
    """Returns what a job printed in which a rank fails, and its losses."""
    (directory / "config.gin").write_text(RANDOM_DATA + settings)
    arguments = ("-m", "tests.e2e.failing_rank", "config.gin", failure)
    return torchrun(directory, *arguments, restarts=restarts), _losses(directory)


def _losses(directory: Path) -> Losses:
    log = train_log(directory / "logs")
    return [(line["step"], line["loss"]) for line in log if line["kind"] == "train"]


def _checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").glob("[!.]*"))


@pytest.fixture(scope="module")
def uninterrupted(kept_ranks, tmp_path_factory) -> Losses:
    directory = tmp_path_factory.mktemp("uninterrupted")
    (directory / "config.gin").write_text(RANDOM_DATA + SETTINGS)
    kept_ranks.train(directory, *RANKING, "--gin-config-file", "config.gin")
    losses = _losses(directory)
    assert [step for step, _ in losses] == list(range(1, NUM_STEPS + 1))
    return losses


@pytest.mark.parametrize("failure", ["exchange", "writing"])
def test_job_resumes_after_a_rank_is_killed(tmp_path, uninterrupted, failure):
    output, losses = _run(tmp_path, failure, restarts=1)
    assert "training resumes from checkpoints/step_" in output or failure == "writing"
    assert dict(losses) == dict(uninterrupted)  # and so those of steps that ran twice
    steps = [step for step, _ in losses]
    assert steps[-1] == NUM_STEPS and len(steps) > NUM_STEPS
    resumed = next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])
    assert steps[resumed:] == list(range(steps[resumed], NUM_STEPS + 1))
    assert _checkpoints(tmp_path) == ["step_2", "step_4", "step_6", "step_8", "step_9"]


def test_terminated_job_saves_and_resumes_when_started_again(kept_ranks, tmp_path, uninterrupted):
    output, losses = _run(tmp_path, "terminated")
    stopped = losses[-1][0]
    assert 4 <= stopped < NUM_STEPS and f"stopped after step {stopped}, as SIGTERM requested" in output
    assert f"step_{stopped}" in _checkpoints(tmp_path)
    output = kept_ranks.train(tmp_path, *RANKING, "--gin-config-file", "config.gin")
    assert f"training resumes from checkpoints/step_{stopped}" in output
    assert _losses(tmp_path) == uninterrupted


def test_full_disk_costs_checkpoints_and_figures_but_not_the_training(tmp_path, uninterrupted):
    output, losses = _run(tmp_path, "disk")
    assert losses == uninterrupted
    assert "the checkpoint of step 2 was not written" in output and "File too large" in output
    assert output.count("figures are no longer written to logs/tensorboard") == 1
    assert _checkpoints(tmp_path) == []  # what was written of them is gone, too
