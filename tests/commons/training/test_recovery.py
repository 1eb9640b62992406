"""A training that was stopped resumes as if it had never stopped."""

import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.commons.distributed.errors_and_warnings import error_of_all, warnings_of
from tests.commons.training.internals import CheckpointFolder, Checkpoints, Progress, StepVote
from tests.commons.training.small_task import lines_in, small_run
from tests.process_pool import RankError

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
    return sorted(path.name for path in folder.glob("checkpoints/[!.]*"))


def _warnings(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The result of a run in this process, and what it warned of."""
    with warnings_of("commons") as said:
        return run(), said


def _all_fail(*runs: Callable[[], Any]) -> list[str]:
    """The errors of runs in this process, which all ranks raise."""
    return [error_of_all(run) for run in runs]


def _dense_weights(checkpoint: str) -> float:
    """The sum of what a checkpoint has for a dense layer."""
    weight = {"model": {"dense.head.0.weight": torch.zeros(8, 16)}}
    Checkpoints(Path(checkpoint).parent).load(Path(checkpoint), weight)
    return float(weight["model"]["dense.head.0.weight"].sum())


def test_a_run_whose_data_shrank_goes_on_with_the_next_epoch(pools, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pools(2).run(partial(_train, str(whole), 3, optimizer="adagrad", ckpt_save_interval=3))  # 24 of 27
    shutil.copytree(whole, parts)
    for folder, last in ((whole, 9), (parts, 6), (parts, 9)):
        run = partial(_train, str(folder), last, num_samples=16, optimizer="adagrad")
        losses, _ = pools(2).run(run)
        assert [step for step, _ in losses] == list(range(1, last + 1))
    assert losses == _train_losses(whole)


def _train_losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines_in(folder / "logs", "train")]


@pytest.mark.parametrize(
    ("settings", "stop"),
    [
        ({"pipeline_type": "native", "max_tokens_per_micro_batch": 30}, EPOCH),
        ({**UNBOUNDED, "eviction": "lru", "pipeline_type": "native"}, 3),
        ({**UNBOUNDED, "eviction": "lfu"}, 4),
    ],
)
def test_resumed_losses_are_those_of_a_run_that_never_stopped(pools, tmp_path, settings, stop):
    def losses(name: str, num_steps: int, eval_interval: int) -> list[tuple[int, float]]:
        run = partial(_train, str(tmp_path / name), num_steps, eval_interval=eval_interval, **settings)
        return pools(2).run(run)[0]

    num_steps = 6
    whole = losses("whole", num_steps, eval_interval=100)  # evaluating in between changes nothing, either
    assert [step for step, _ in whole] == list(range(1, num_steps + 1))
    assert losses("stopped", stop, eval_interval=3) == whole[:stop]
    assert losses("stopped", num_steps, eval_interval=3) == whole


def _train_until_terminated(folder: str) -> None:
    after_step = StepVote.after_step

    def terminate(vote: StepVote, step: int, loss: torch.Tensor) -> bool:
        if step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return after_step(vote, step, loss)

    with mock.patch.object(StepVote, "after_step", terminate):
        _train(folder, 6, log_interval=3, eval_interval=1)


def test_termination_of_a_rank_loses_neither_figures_nor_an_evaluation(pools, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run = partial(_train, num_steps=6, log_interval=3, eval_interval=1)
    pools(2).run(run, str(whole))
    pools(2).run(_train_until_terminated, str(stopped))
    [stop] = lines_in(stopped / "logs", "stop")
    last = stop["step"]
    assert 3 < last < 6 and _names(stopped)[-1] == f"step_{last}"
    assert [step for step, _ in _train_losses(stopped)] == [3, last]
    pools(2).run(run, str(stopped))
    assert [step for step, _ in _train_losses(stopped)] == [3, last, 6]
    evaluations = [
        [(line["step"], line["labels"]) for line in lines_in(folder / "logs", "eval")]
        for folder in (whole, stopped)
    ]
    assert len(evaluations[0]) == 6 and evaluations[0] == evaluations[1]


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


def _train_on_a_full_disk(folder: str) -> tuple[list[tuple[int, float]], list[str]]:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))  # beyond this size, writing fails
    try:
        return _warnings(partial(_train, folder, 9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_full_disk_costs_checkpoints_and_figures_but_not_the_training(pools, copied):
    folder, _ = copied
    (folder / "logs/train.jsonl").unlink()  # so that the next lines fit
    (losses, warnings), _ = pools(2).run(_train_on_a_full_disk, str(folder))
    assert [step for step, _ in losses] == [5, 6, 7, 8, 9]
    for step in (6, 8):
        [lost] = [line for line in warnings if f"checkpoint of step {step} was not written" in line]
        assert "File too large" in lost
    assert len([line for line in warnings if "no longer written to " in line and "tensorboard" in line]) == 1
    assert _names(folder) == ["step_2", "step_4"]  # what was written of others is gone
    again, _ = pools(2).run(partial(_train, str(folder), 9))
    assert again == 2 * losses and _names(folder)[-1] == "step_9"


def _damage(checkpoint: Path) -> None:
    """Flips a bit that DCP's reader would not notice: the sign of a weight."""
    largest = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2 | 3] ^= 0x80
    largest.write_bytes(data)


def test_steps_after_a_damaged_checkpoint_are_computed_again(pools, copied):
    folder, first = copied
    _damage(folder / "checkpoints/step_4")
    (steps, warnings), (_, others) = pools(2).run(_warnings, partial(_train, str(folder), EPOCH))
    assert steps == [*first, *first[2:]]
    expected = f"{folder}/checkpoints/step_4 is damaged and is skipped: __"
    assert [warning for warning in warnings if warning.startswith(expected)] and not others
    assert pools(2).run(partial(_train, str(folder), EPOCH))[0] == steps  # what was written again is whole


def test_a_run_stops_if_the_only_checkpoint_to_start_from_is_damaged(pools, copied):
    folder, _ = copied
    shutil.rmtree(folder / "checkpoints/step_2")
    _damage(folder / "checkpoints/step_4")
    reading = {"ckpt_load_dir": f"{folder}/checkpoints", "ckpt_save_interval": -1}
    runs = [partial(_train, str(folder), EPOCH, **settings) for settings in ({}, reading)]
    errors, _ = pools(2).run(_all_fail, *runs)
    assert all(re.match("ValueError: .*checkpoints has no .*step_4 is damaged", error) for error in errors)


def test_a_checkpoint_of_another_training_is_refused_on_all_ranks(pools, saved):
    differences = {
        r"parameter dense.encoder.layers.1.* = 'absent', the checkpoint has 'float32": {"num_layers": 1},
        r"= 'float32 \[8\]', the checkpoint has 'float32 \[16\]'": {"hidden_size": 8},
        "OptimizerArgs.optimizer_str = 'adagrad', the checkpoint has 'adam'": {"optimizer": "adagrad"},
        "TrainerArgs.seed = 1, the checkpoint has 1234": {"seed": 1},
    }
    folder, _ = saved
    runs = (partial(_train, str(folder), 6, **settings) for settings in differences.values())
    errors, _ = pools(2).run(_all_fail, *runs)
    for error, difference in zip(errors, differences, strict=True):
        found = f"ValueError: {folder}/checkpoints/step_4 is of another training: .*{difference}"
        assert re.match(found, error), error
    assert _names(folder) == ["step_2", "step_4"]


def test_settings_that_may_change_are_named_and_take_effect(pools, copied):
    folder, _ = copied
    run = partial(_train, str(folder), 6, learning_rate=0.0, train_batch_size=2, balance_tolerance=0.5)
    (steps, warnings), _ = pools(2).run(_warnings, run)
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6]
    changed = [line for line in warnings if line.startswith("training goes on with")]
    expected = "training goes on with OptimizerArgs.learning_rate = 0.0, the checkpoint has 0.05"
    assert changed == [expected]
    final, before = (folder / f"checkpoints/step_{step}" for step in (6, 4))
    assert pools(2).run(_dense_weights, str(final)) == pools(2).run(_dense_weights, str(before))


def test_old_checkpoints_and_leftovers_go(copied):
    folder = CheckpointFolder(path := copied[0] / "checkpoints")
    (path / ".lock").unlink()
    (path / "step_9").mkdir()  # training went back to before it
    (path / "step_4.old.unfinished").mkdir()
    (path / "notes").mkdir()
    unfinished, contents = folder.begin(6, {}), {"data": [7, "its checksum"]}
    assert not (path / "step_4.old.unfinished").exists()
    with pytest.raises(FileNotFoundError, match="has no data, which a rank has written"):
        folder.publish(unfinished, contents, keep=2)
    (unfinished / "data").write_text("numbers")
    assert folder.publish(unfinished, contents, keep=2) == path / "step_6"
    assert _names(copied[0]) == ["notes", "step_4", "step_6"]


@pytest.mark.parametrize("interval", [EPOCH, EPOCH + 1])
def test_a_run_that_only_reads_or_restarts_resumes_says_what_is_left_and_evaluates(pools, copied, interval):
    folder, first = copied
    load_dir = str(folder / "checkpoints") if interval > EPOCH else ""
    run = partial(_train, str(folder), None, ckpt_save_interval=interval, ckpt_load_dir=load_dir)
    (steps, said), (_, others) = pools(2).run(_warnings, run)
    assert steps == first  # no step is left
    assert said[-1].startswith(f"NOTHING LEFT TO TRAIN: {folder}/checkpoints/step_4 is of step 4")
    assert others == [] and _names(folder) == ["step_2", "step_4"]
    *_, before, again = lines_in(folder / "logs", "eval")
    assert before == again


def _train_to_the_best(folder: str, **settings: Any) -> tuple[list[float], list[str]]:
    _, evaluations = small_run(
        f"{folder}/logs", eval_interval=1, ckpt_save_dir=f"{folder}/checkpoints", **settings
    )
    kept = sorted(path.name for path in (Path(folder) / "checkpoints" / "best").glob("[!.]*"))
    return [figures["labels"] for figures in evaluations], kept


def test_a_larger_value_is_the_best_and_others_are_counted_since():
    progress, found = Progress(), []
    for value in (0.1, 0.3, 0.3, 0.2, 0.4):
        progress = progress.after_evaluation(value)
        found.append((progress.best, progress.evaluations_since_best))
    assert found == [(0.1, 0), (0.3, 0), (0.3, 1), (0.3, 2), (0.4, 0)]


def test_the_best_checkpoint_stays_and_training_stops_after_it(pools, tmp_path):
    settings = {
        "best_metric": "labels",
        "early_stop_patience": 2,
        "max_train_iters": 30,
        "learning_rate": 2.0,
    }
    (values, kept), (others, _) = pools(2).run(partial(_train_to_the_best, str(tmp_path), **settings))
    best = int(np.argmax(values))
    assert values == others and len(values) == best + 3 < 30
    assert kept == [f"step_{best + 1}"]
    again = partial(_train_to_the_best, str(tmp_path / "other"), ckpt_save_interval=1, **settings)
    assert pools(2).run(again)[0] == (values, kept)
    assert pools(2).run(again)[0] == ([], kept)  # a run that has stopped early does not go on
    with pytest.raises(RankError, match=r"TrainerArgs.best_metric = 'HR@10': evaluations have \['labels'\]"):
        pools(2).run(partial(_train_to_the_best, str(tmp_path / "wrong"), best_metric="HR@10"))
