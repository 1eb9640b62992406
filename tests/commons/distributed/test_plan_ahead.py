"""Planning ahead in a thread."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.commons.distributed.internals import Step
from tests.commons.distributed.shufflers import DictShuffler, FieldShuffler, Posting
from tests.drawn_batches import MixedBatch, draw_batch
from tests.on_ranks import on_ranks

NUM_BATCHES = (5, 2)


def _batches() -> Iterator[MixedBatch]:
    rank = dist.get_rank()
    for number in range(NUM_BATCHES[rank]):
        yield draw_batch(np.random.default_rng((rank, number)), 1000 * rank + 10 * number, 4, 3)


class Interrupted(BaseException):
    """Raised by a signal, as KeyboardInterrupt is."""


class SlowAtThird(DictShuffler):
    def get_workloads(self, batch):
        if batch["number"][0] == 2:
            time.sleep(0.3)
        return batch["number"]


def _interrupt(*_):
    raise Interrupted


@on_ranks(1)
def test_a_step_is_not_lost_where_a_signal_interrupts_the_wait_for_its_plan():
    batches = ({"number": torch.full((2,), number)} for number in range(4))
    ahead, steps = SlowAtThird().ahead(), []
    before = signal.signal(signal.SIGALRM, _interrupt)
    try:
        for number in range(4):
            signal.setitimer(signal.ITIMER_REAL, 0.1 if number == 2 else 0)
            with pytest.raises(Interrupted) if number == 2 else nullcontext():
                steps.append(ahead.next_step(batches))
        signal.setitimer(signal.ITIMER_REAL, 0)
        steps.append(ahead.next_step(batches))
        assert [int(step.batch["number"][0]) for step in steps] == [0, 1, 2, 3]
        assert ahead.next_step(batches) is None
    finally:
        signal.signal(signal.SIGALRM, before)


class SlowOnRank1(FieldShuffler):
    def get_workloads(self, batch):
        if dist.get_rank():
            time.sleep(0.3)  # so that rank 0 waits for the plan
        return super().get_workloads(batch)


@on_ranks(2)
def test_the_death_of_a_worker_during_the_wait_for_a_plan_is_raised_by_all_ranks():
    batches = (draw_batch(np.random.default_rng(number), 0, 4, 3) for number in range(6))
    wait, died, steps = Future.result, False, 0

    def result(future: Future) -> Any:
        nonlocal died
        if not (died or future.done() or dist.get_rank()):
            died = True  # as torch's handler of SIGCHLD raises, wherever the main thread is
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed")
        return wait(future)

    with (
        mock.patch.object(Future, "result", result),
        pytest.raises(RuntimeError, match="is killed"),
    ):
        for _ in SlowOnRank1().plan_ahead(batches):
            steps += 1
    assert steps < 6


class Unreadable:
    def __iter__(self):
        if dist.get_rank():
            raise OSError("index cannot be read")
        return _batches()


@on_ranks(2)
def test_an_error_of_iter_is_raised_by_all_ranks():
    with pytest.raises(OSError, match="index cannot be read"):
        next(FieldShuffler().plan_ahead(Unreadable()))


@on_ranks(2)
def test_planning_alongside_a_loop_is_refused_and_does_not_open_its_shuffler():
    shuffler, batch, moved = FieldShuffler(), draw_batch(np.random.default_rng(0), 0, 4, 3), []
    for loaded, plan in shuffler.plan_ahead(_batches()):
        for other in (lambda: shuffler.plan(batch), lambda: next(shuffler.plan_ahead(_batches()))):
            with pytest.raises(RuntimeError, match=r"plans for .* a loop over plan_ahead.*another shuffler"):
                other()
        moved.append(shuffler.exchange(loaded, plan))
    assert len(moved) == max(NUM_BATCHES)
    shuffler.plan(batch)  # the loop has ended


def _numbers(count: int, broken: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
    """Gives batches of one number each; the broken one cannot be read."""
    return map(partial(_read, broken=broken), range(count))  # goes on after an error, as a generator does not


def _read(number: int, broken: int | None) -> dict[str, torch.Tensor]:
    if number == broken:
        raise OSError(f"file {number} cannot be read")
    return {"workload": torch.tensor([number])}


def _number(step: Step) -> int:
    assert step.plan.rows.workloads.tolist() == step.batch["workload"].tolist()  # the plan of this batch
    return int(step.batch["workload"])


class Persistent:
    """Gives its batches again after each end, as the iterator of a DataLoader with persistent workers."""

    def __init__(self, count: int) -> None:
        self._count, self._given, self.asked = count, 0, 0

    def __next__(self) -> dict[str, torch.Tensor]:
        self.asked += 1
        self._given = (self._given + 1) % (self._count + 1)
        if self._given == 0:
            raise StopIteration
        return _read(self._given - 1, None)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_after_its_end_the_same_iterator_starts_anew_or_another_one(count):
    ahead, same = DictShuffler().ahead(), Persistent(count)
    for loader in (same, same, _numbers(count), same):
        assert [_number(ahead.next_step(loader)) for _ in range(count)] == list(range(count))
        assert ahead.next_step(loader) is None
    assert same.asked == 3 * (count + 1)


def test_one_batch_is_loaded_ahead():
    ahead, loaded = DictShuffler().ahead(), []
    loader = (loaded.append(batch) or batch for batch in _numbers(50))
    for step in range(20):
        ahead.next_step(loader)
        assert len(loaded) == step + 2


def test_an_error_of_a_dropped_batch_is_logged_and_forgotten(caplog):
    ahead, loader = DictShuffler().ahead(), _numbers(3, broken=1)
    ahead.next_step(loader)
    ahead.drop()
    assert "a batch that is dropped had failed: OSError: file 1 cannot be read" in caplog.text
    assert _number(ahead.next_step(loader)) == 2
    assert ahead.next_step(loader) is None


@on_ranks(2)
def test_what_all_ranks_posted_with_a_plan_is_taken_as_its_step_is_handed_out():
    posting = Posting()
    ahead, loader = FieldShuffler(extensions=[posting]).ahead(), _batches()
    for number in range(max(NUM_BATCHES)):
        assert ahead.next_step(loader) is not None
        assert posting.taken[-1] == [[10 * number], [10 * number + 1]]
    assert ahead.next_step(loader) is None
    assert posting.taken[-1] == [[10 * number], [10 * number + 1]]
