"""Planning ahead in a thread."""

from __future__ import annotations

import signal
import threading
import time
from collections import UserDict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShuffler, Extension
from tests.commons.distributed.internals import PlanAhead, Step
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


class Remembering(UserDict):
    """A mapping that computes a sum of each row once, as tokenizers' batches may."""

    @cached_property
    def totals(self) -> torch.Tensor:
        return self["x"].sum(1)


class TotalsShuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch.totals.long()


@on_ranks(2)
def test_cached_properties_of_an_exchanged_batch_are_those_of_its_own_rows():
    x = torch.tensor([[[1.0, 1.0], [2.0, 2.0]], [[9.0, 9.0], [8.0, 8.0]]])[dist.get_rank()]
    shuffler = TotalsShuffler()
    planned = shuffler.plan_ahead([Remembering(x=x.clone()), Remembering(x=x.flip(0))])
    moved = [shuffler.exchange(*step) for step in planned]
    assert len(moved) == 2
    for batch in moved:
        assert batch.totals.tolist() == batch["x"].sum(1).tolist()


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


def _ahead(*extensions: Extension) -> PlanAhead:
    return DictShuffler(extensions=extensions).ahead()


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
    ahead, same = _ahead(), Persistent(count)
    for loader in (same, same, _numbers(count), same):
        assert [_number(ahead.next_step(loader)) for _ in range(count)] == list(range(count))
        assert ahead.next_step(loader) is None
    assert same.asked == 3 * (count + 1)


def test_one_batch_is_loaded_ahead():
    ahead, loaded = _ahead(), []
    loader = (loaded.append(batch) or batch for batch in _numbers(50))
    for step in range(20):
        ahead.next_step(loader)
        assert len(loaded) == step + 2


def test_an_error_of_a_dropped_batch_is_logged_and_forgotten(caplog):
    ahead, loader = _ahead(), _numbers(3, broken=1)
    ahead.next_step(loader)
    ahead.drop()
    assert "a batch that is dropped had failed: OSError: file 1 cannot be read" in caplog.text
    assert _number(ahead.next_step(loader)) == 2
    assert ahead.next_step(loader) is None


class Checking(Extension):
    """Prepares each step but one."""

    name, order = "checking", 0

    def __init__(self) -> None:
        self.checked: list[int] = []

    def before_copy(self, rows, plan):
        assert threading.current_thread() is not threading.main_thread()
        self.checked += plan.rows.workloads.tolist()
        if self.checked[-1] == 3:
            raise LookupError("step 3 is wrong")
        return rows


def test_a_step_that_cannot_be_prepared_is_left_out():
    checking = Checking()
    ahead, loader = _ahead(checking), _numbers(5)
    assert [_number(ahead.next_step(loader)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LookupError, match="step 3 is wrong"):
        ahead.next_step(loader)
    assert _number(ahead.next_step(loader)) == 4 and ahead.next_step(loader) is None
    assert checking.checked == [0, 1, 2, 3, 4]


def test_a_step_has_the_mode_in_which_its_batch_was_loaded():
    ahead, loader = _ahead(), _numbers(4)
    steps = [ahead.next_step(loader, mode) for mode in (True, False, False, False)]
    assert [step.mode for step in steps] == [True, True, False, False]


def _posts() -> list[list[int]]:
    """Returns what an extension has taken when each step is handed out, and after the last."""
    posting, found = Posting(), []
    ahead, loader = FieldShuffler(extensions=[posting]).ahead(), _batches()
    while ahead.next_step(loader) is not None:
        found.append(posting.newest)
    assert posting.newest == found[-1]
    return found


def test_what_all_ranks_posted_with_a_plan_is_taken_as_its_step_is_handed_out(pools):
    expected = [[10 * number, 10 * number + 1] for number in range(max(NUM_BATCHES))]
    assert pools(2).run(_posts) == [expected] * 2
