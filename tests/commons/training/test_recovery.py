"""A training that was stopped resumes as if it had never stopped."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path

import pytest

from commons.training.checkpoints import CONTENTS_FILE, CheckpointFolder
from tests.commons.training.small_task import lines_in, small_run

EPOCH = 4  # steps of two ranks
UNBOUNDED = {"optimizer": "adagrad", "num_samples": 120}


def _train(folder: str, num_steps: int | None, **settings) -> list[tuple[int, float]]:
    """Steps and losses of all runs in a folder, on rank 0."""
    defaults = {
        "ckpt_save_interval": 2,
        "ckpt_save_dir": f"{folder}/checkpoints",
        "max_train_iters": num_steps,
        "eval_interval": 3,
        "enable_balanced_shuffler": True,
        "optimizer": "adam",
        "pipeline_type": "none",
    }
    return small_run(f"{folder}/logs", dropout=0.3, **{**defaults, **settings})[0]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("settings", "stop"),
    [
        ({"optimizer": "adagrad"}, EPOCH),
        ({"optimizer": "sgd", "pipeline_type": "native", "balance_window": 2}, 6),
        ({"pipeline_type": "native", "max_tokens_per_micro_batch": 30}, 5),
        ({**UNBOUNDED, "eviction": "lru", "pipeline_type": "native"}, 7),
        ({**UNBOUNDED, "eviction": "lfu"}, 8),
    ],
)
def test_resumed_losses_are_those_of_a_run_that_never_stopped(pools, tmp_path, settings, stop):
    def losses(name: str, num_steps: int, eval_interval: int) -> list[tuple[int, float]]:
        run = partial(_train, str(tmp_path / name), num_steps, eval_interval=eval_interval, **settings)
        return pools(2).run(run)[0]

    num_steps = 15 if "eviction" in settings else 9
    whole = losses("whole", num_steps, eval_interval=100)  # evaluating in between changes nothing, either
    assert [step for step, _ in whole] == list(range(1, num_steps + 1))
    assert losses("stopped", stop, eval_interval=3) == whole[:stop]
    assert losses("stopped", num_steps, eval_interval=3) == whole


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    """The folder of a run of one epoch on two ranks, and its steps and losses."""
    folder = tmp_path_factory.mktemp("saved")
    steps = pools(2).run(partial(_train, str(folder), EPOCH))[0]
    assert [step for step, _ in steps] == [1, 2, 3, 4] and _names(folder) == ["step_2", "step_4"]
    return folder, steps


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of the folder, for another run, and the same steps."""
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    return tmp_path, saved[1]


def test_three_ranks_resume_what_two_saved(pools, copied):
    folder, first = copied
    both = pools(3).run(partial(_train, str(folder), 6, pipeline_type="native"))[0]
    assert both[:EPOCH] == first
    assert [step for step, _ in both] == [1, 2, 3, 4, 5, 6]


def _damage(checkpoint: Path, how: str) -> None:
    largest = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if how == "truncated":
        largest.write_bytes(largest.read_bytes()[:-1])
    elif how == "missing":
        largest.unlink()
    else:
        (checkpoint / CONTENTS_FILE).unlink()


@pytest.mark.parametrize("how", ["truncated", "missing", "unlisted"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(copied, how):
    folder = copied[0] / "checkpoints"
    assert CheckpointFolder(folder).newest() == (folder / "step_4", [])
    _damage(folder / "step_4", how)
    newest, (problem,) = CheckpointFolder(folder).newest()
    assert newest == folder / "step_2" and problem.startswith(f"{folder}/step_4 is not whole and is skipped")


def test_steps_after_a_damaged_checkpoint_are_computed_again(pools, copied):
    folder, first = copied
    _damage(folder / "checkpoints/step_4", "truncated")
    assert pools(2).run(partial(_train, str(folder), EPOCH))[0] == [*first, *first[2:]]
    assert CheckpointFolder(folder / "checkpoints").newest()[0].name == "step_4"


def test_old_checkpoints_and_leftovers_go(copied):
    folder = CheckpointFolder(path := copied[0] / "checkpoints")
    (path / "step_9").mkdir()  # training went back to before it
    (path / "step_4.old.unfinished").mkdir()
    (path / "notes").mkdir()
    unfinished = folder.begin(6)
    with pytest.raises(FileNotFoundError, match="has no data, which a rank has written"):
        folder.publish(unfinished, {"data"}, keep=2)
    (unfinished / "data").write_text("numbers")
    assert folder.publish(unfinished, {"data"}, keep=2) == path / "step_6"
    assert _names(copied[0]) == ["notes", "step_4", "step_6"]


@pytest.mark.parametrize("with_checkpoints", [False, True])
def test_an_interval_beyond_the_run_neither_saves_nor_resumes(pools, saved, copied, with_checkpoints):
    folder, first = copied
    if not with_checkpoints:
        shutil.rmtree(folder / "checkpoints")
    before = _names(folder)
    steps = pools(2).run(partial(_train, str(folder), None, ckpt_save_interval=EPOCH + 1))[0]
    assert steps == 2 * first and _names(folder) == before


@pytest.mark.parametrize("interval", [EPOCH, EPOCH + 1])
def test_a_run_that_only_reads_or_restarts_resumes(pools, copied, interval):
    folder, first = copied
    load_dir = str(folder / "checkpoints") if interval > EPOCH else ""
    run = partial(_train, str(folder), None, ckpt_save_interval=interval, ckpt_load_dir=load_dir)
    assert pools(2).run(run)[0] == first  # no step is left
    assert _names(folder) == ["step_2", "step_4"]


def _log_of_nothing_left(folder: str) -> list[str]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("commons.training.trainer")
    logger.addHandler(handler)
    try:
        _train(folder, EPOCH)
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in records]


def test_a_run_with_nothing_left_to_train_says_so_and_evaluates(pools, copied):
    folder, _ = copied
    (said,), others = pools(2).run(_log_of_nothing_left, str(folder))
    assert said.startswith(f"NOTHING LEFT TO TRAIN: {folder}/checkpoints/step_4 is of step 4")
    assert others == []
    *_, before, again = lines_in(folder / "logs", "eval")
    assert before == again
