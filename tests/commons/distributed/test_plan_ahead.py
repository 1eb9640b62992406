"""Planning ahead in a thread."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
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

from commons.distributed import Extension
from commons.distributed.plan_ahead import PlanAhead
from commons.distributed.step import Step
from tests.commons.distributed.shufflers import DictShuffler, FieldShuffler, Posting
from tests.drawn_batches import MixedBatch, draw_batch, sample_contents
from tests.on_ranks import on_ranks

NUM_BATCHES = (5, 2)


def _batches(fails: bool = False) -> Iterator[MixedBatch]:
    rank = dist.get_rank()
    for number in range(NUM_BATCHES[rank]):
        if fails and (rank, number) == (0, 3):
            raise OSError("no more files")
        yield draw_batch(np.random.default_rng((rank, number)), 1000 * rank + 10 * number, 4, 3)


def _loop() -> tuple[list, list, int]:
    shuffler = FieldShuffler()
    for _, _ in zip(shuffler.plan_ahead(_batches()), range(2), strict=False):
        pass  # all ranks may leave a loop early
    steps = [shuffler.exchange(batch, plan) for batch, plan in shuffler.plan_ahead(_batches())]
    loaded = [content for batch in _batches() for content in sample_contents(batch)]
    return loaded, [content for batch in steps for content in sample_contents(batch)], len(steps)


def test_a_loop_computes_each_sample_once(pools):
    results = pools(2).run(_loop)
    before, after = (Counter(content for result in results for content in result[i]) for i in (0, 1))
    assert before == after
    assert [num_steps for *_, num_steps in results] == [max(NUM_BATCHES)] * 2


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
def test_planning_alongside_a_loop_is_refused():
    shuffler, batch = FieldShuffler(), draw_batch(np.random.default_rng(0), 0, 4, 3)
    errors = []
    for _ in shuffler.plan_ahead(_batches()):
        with pytest.raises(RuntimeError) as error:
            shuffler.plan(batch)
        errors.append(str(error.value))
    shuffler.plan(batch)  # the loop has ended
    assert len(errors) == max(NUM_BATCHES)
    assert "this FieldShuffler plans for a pipeline, or a loop over plan_ahead" in errors[0]


def _loop_over_failing_files() -> int:
    steps = 0
    with pytest.raises(OSError, match="no more files"):
        for _ in FieldShuffler().plan_ahead(_batches(fails=True)):
            steps += 1
    return steps


def test_a_failing_loader_ends_the_loops_of_all_ranks(pools):
    assert pools(2).run(_loop_over_failing_files) == [3, 3]


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


@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_steps_come_in_order_one_loader_after_another(count):
    ahead = _ahead()
    for _ in range(2):
        loader = _numbers(count)
        steps = [ahead.next_step(loader) for _ in range(count + 2)]
        assert [_number(step) for step in steps[:count]] == list(range(count))
        assert steps[count:] == [None, None]


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
def test_after_its_end_the_same_iterator_starts_anew(count):
    ahead, loader = _ahead(), Persistent(count)
    for epoch in range(3):
        assert [_number(ahead.next_step(loader)) for _ in range(count)] == list(range(count))
        assert ahead.next_step(loader) is None
        assert loader.asked == (epoch + 1) * (count + 1)


def _epochs_after_a_drop() -> list[int]:
    """Drops an epoch in which rank 1 has ended, and counts the steps of those after it."""
    ahead, loader = DictShuffler().ahead(), Persistent((8, 4)[dist.get_rank()])
    for _ in range(6):
        ahead.next_step(loader)
    ahead.drop()
    loader._given = 0
    return [sum(1 for _ in iter(partial(ahead.next_step, loader), None)) for _ in range(2)]


def test_a_drop_forgets_that_a_rank_had_ended(pools):
    assert pools(2).run(_epochs_after_a_drop) == [[8, 8]] * 2


def test_steps_continue_after_an_error():
    ahead = _ahead()
    with pytest.raises(OSError):
        ahead.next_step(_numbers(1, broken=0))
    loader = _numbers(3)
    assert [_number(ahead.next_step(loader)) for _ in range(3)] == [0, 1, 2]


def test_steps_go_on_with_the_batches_after_one_that_failed():
    ahead, loader, numbers = _ahead(), _numbers(9, broken=5), []
    for _ in range(11):
        try:
            step = ahead.next_step(loader)
        except OSError as error:
            assert str(error) == "file 5 cannot be read"
        else:
            numbers += [] if step is None else [_number(step)]
    assert numbers == [number for number in range(9) if number != 5]


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
