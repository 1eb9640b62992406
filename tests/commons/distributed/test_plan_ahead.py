"""Planning ahead in a thread, for a custom training loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch.distributed as dist

from commons.distributed.plan_ahead import PlanAhead
from tests.commons.distributed.shufflers import FieldShuffler
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


def _numbers(count: int, ends_with: Exception | None = None) -> Iterator[int]:
    yield from range(count)
    if ends_with is not None:
        raise ends_with


def _ahead() -> PlanAhead[int]:
    def plan(loaded, failure):
        if failure is not None:
            raise failure
        return loaded

    return PlanAhead(plan, lambda number: number)


@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_steps_come_in_order_one_loader_after_another(count):
    ahead = _ahead()
    for _ in range(2):
        loader = _numbers(count)
        steps = [ahead.next_step(loader) for _ in range(count + 2)]
        assert [step[0] for step in steps[:count]] == list(range(count))
        assert steps[count:] == [None, None]


def test_one_batch_is_loaded_ahead():
    ahead, loaded = _ahead(), []
    loader = (loaded.append(number) or number for number in range(50))
    for step in range(20):
        ahead.next_step(loader)
        assert len(loaded) == step + 2


def test_a_dropped_error_is_raised_by_the_next_step():
    ahead, loader = _ahead(), _numbers(1, OSError("no more files"))
    ahead.next_step(loader)
    ahead.drop()
    with pytest.raises(OSError, match="no more files"):
        for _ in range(3):
            ahead.next_step(loader)


def test_steps_continue_after_an_error():
    ahead = _ahead()
    with pytest.raises(OSError):
        ahead.next_step(_numbers(0, OSError("no more files")))
    loader = _numbers(3)
    assert [ahead.next_step(loader)[0] for _ in range(3)] == [0, 1, 2]


class _Files:
    """Numbers, of which one cannot be read."""

    def __init__(self, count: int, broken: int) -> None:
        self._numbers, self._broken = iter(range(count)), broken

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        number = next(self._numbers)
        if number == self._broken:
            raise OSError(f"file {number} cannot be read")
        return number


def test_steps_go_on_with_the_batches_after_one_that_failed():
    ahead, loader, numbers = _ahead(), _Files(9, broken=5), []
    for _ in range(11):
        try:
            step = ahead.next_step(loader)
        except OSError as error:
            assert str(error) == "file 5 cannot be read"
        else:
            numbers += [] if step is None else [step[0]]
    assert numbers == [number for number in range(9) if number != 5]
