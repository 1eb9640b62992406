"""A training that was stopped goes on as if it had not been."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commons.training import OptimizerArgs, TrainerArgs, train
from commons.training.checkpoint_folder import CONTENTS_FILE
from tests.commons.training.small_task import small_task
from tests.commons.training.test_trainer import CountedLabels, _dataset
from tests.hstu.hstu_samples import ranking_model


def _train(
    log_dir: str, num_steps: int | None, optimizer: str = "adam", **settings
) -> list[tuple[int, float]]:
    """Steps and losses of this process's run, of which rank 0 has a log."""
    task = small_task(
        ranking_model(hidden_dropout=0.3), _dataset(27, False), _dataset(13, False), CountedLabels()
    )
    args = TrainerArgs(
        train_batch_size=4,
        log_interval=1,
        log_dir=log_dir,
        max_train_iters=num_steps,
        eval_interval=3,
        enable_balanced_shuffler=True,
        **settings,
    )
    train(task, args, OptimizerArgs(optimizer, 0.05), torch.device("cpu"))
    if dist.get_rank():
        return []
    lines = [json.loads(line) for line in (Path(log_dir) / "train.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize(
    ("optimizer", "settings", "stop"),
    [
        ("adam", {"pipeline_type": "native"}, 3),
        ("adagrad", {"pipeline_type": "none"}, 4),  # at the end of an epoch
        ("sgd", {"pipeline_type": "native", "balance_window": 2}, 6),
        ("adam", {"pipeline_type": "native", "max_tokens_per_micro_batch": 30}, 5),
    ],
)
def test_resumed_losses_are_those_of_a_run_that_never_stopped(pools, tmp_path, optimizer, settings, stop):
    def losses(name: str, num_steps: int) -> list[tuple[int, float]]:
        run = partial(
            _train,
            str(tmp_path / name / "logs"),
            num_steps,
            optimizer,
            ckpt_save_interval=2,
            ckpt_save_dir=str(tmp_path / name / "checkpoints"),
            **settings,
        )
        return pools(2).run(run)[0]

    whole = losses("whole", 9)
    stopped = losses("stopped", stop)
    assert stopped == whole[:stop]
    resumed = losses("stopped", 9)
    assert resumed == whole
    assert [step for step, _ in resumed] == list(range(1, 10))


def _resume_elsewhere(log_dir: str, save_dir: str, num_steps: int) -> list[tuple[int, float]]:
    return _train(log_dir, num_steps, ckpt_save_interval=2, ckpt_save_dir=save_dir, pipeline_type="native")


def test_what_two_ranks_saved_three_resume(pools, tmp_path):
    run = partial(_resume_elsewhere, str(tmp_path / "logs"), str(tmp_path / "checkpoints"))
    first = pools(2).run(run, 2)[0]
    both = pools(3).run(run, 4)[0]
    assert both[:2] == first
    assert [step for step, _ in both] == [1, 2, 3, 4]


def _damage(checkpoint: Path, how: str) -> None:
    largest = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if how == "truncated":
        largest.write_bytes(largest.read_bytes()[:-1])
    elif how == "missing":
        largest.unlink()
    else:
        (checkpoint / CONTENTS_FILE).unlink()


@pytest.mark.parametrize("how", ["truncated", "missing", "unlisted"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(pools, tmp_path, how):
    def run(num_steps: int) -> list[tuple[int, float]]:
        save_dir = str(tmp_path / "checkpoints")
        return pools(2).run(partial(_resume_elsewhere, str(tmp_path / "logs"), save_dir, num_steps))[0]

    first = run(4)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_2", "step_4"]
    _damage(tmp_path / "checkpoints" / "step_4", how)
    both = run(4)
    assert both == [*first, *first[2:]]  # steps 3 and 4 once more, the same


STEPS_OF_AN_EPOCH = 4  # of two ranks


def _in_one_folder(folder: str, num_steps: int | None, interval: int, **settings) -> list[tuple[int, float]]:
    folders = {"ckpt_save_dir": f"{folder}/checkpoints", **settings}
    return _train(f"{folder}/logs", num_steps, pipeline_type="none", ckpt_save_interval=interval, **folders)


def test_an_interval_beyond_the_run_neither_saves_nor_resumes(pools, tmp_path):
    def run(interval: int, **settings) -> tuple[list[tuple[int, float]], list[str]]:
        """Steps of all runs until here and their losses, and the checkpoints that there are."""
        steps = pools(2).run(partial(_in_one_folder, str(tmp_path), None, interval, **settings))[0]
        return steps, sorted(path.name for path in tmp_path.glob("checkpoints/*"))

    never = STEPS_OF_AN_EPOCH + 1
    first, checkpoints = run(never)
    assert [step for step, _ in first] == [1, 2, 3, 4] and not checkpoints
    assert run(never) == (2 * first, [])
    saving, checkpoints = run(STEPS_OF_AN_EPOCH - 1)  # in the folder of runs that saved nothing
    assert (saving, checkpoints) == (3 * first, ["step_3", "step_4"])
    assert run(never) == (4 * first, checkpoints)
    assert run(never, ckpt_load_dir=str(tmp_path / "checkpoints")) == (4 * first, checkpoints)  # none left
    assert run(STEPS_OF_AN_EPOCH) == (4 * first, checkpoints)  # as of a run that was restarted


def _log_of_nothing_left(folder: str) -> list[str]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("commons.training.trainer")
    logger.addHandler(handler)
    try:
        _in_one_folder(folder, 2, 2)
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in records]


def test_a_run_with_nothing_left_to_train_says_so_and_evaluates(pools, tmp_path):
    first, others = pools(2).run(_log_of_nothing_left, str(tmp_path))
    assert first == others == []
    (said,), others = pools(2).run(_log_of_nothing_left, str(tmp_path))
    assert said.startswith(f"NOTHING LEFT TO TRAIN: {tmp_path}/checkpoints/step_2 is of step 2")
    assert others == []
    lines = [json.loads(line) for line in (tmp_path / "logs/train.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert len(evaluations) == 2 and evaluations[0] == evaluations[1]
