"""With `verify` ranks notice that they do not do the same, and all of them say so."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed.exchange import EXCHANGES, Exchange
from commons.sequence_batch.packed_rows import select_from
from tests.commons.distributed.test_shuffle import FieldShuffler
from tests.drawn_batches import draw_batch

BOTH = sorted(EXCHANGES)


def _batch():
    """Four samples per rank, of which those of rank 0 are heavier."""
    rank = dist.get_rank()
    batch = draw_batch(np.random.default_rng(rank), 1000 * (rank + 1), 4, 4)
    batch.workload = torch.arange(4) + 100 * (rank == 0)
    return batch


def _error(function, *args) -> str:
    try:
        function(*args)
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "no error"


class DifferentShuffler(FieldShuffler):
    """From the second step on, rank 1 swaps what the first two ranks get."""

    steps = 0

    def _placed(self, gathered):
        window = super()._placed(gathered)
        self.steps += 1
        if self.steps == 1 or dist.get_rank() != 1:
            return window
        first, second, *others = window.steps[0].partition
        swapped = dataclasses.replace(window.steps[0], partition=(second, first, *others))
        return dataclasses.replace(window, steps=(swapped, *window.steps[1:]))


def _different_plans(window: int) -> str:
    shuffler = DifferentShuffler(window=window, verify=True)
    shuffler.plan_window([_batch()] * window)
    return _error(shuffler.plan_window, [_batch()] * window)


@pytest.mark.parametrize("window", [1, 2])
def test_ranks_that_plan_differently_all_say_both_hashes(pools, window):
    errors = pools(3).run(_different_plans, window)
    assert errors[0] == errors[1] == errors[2]
    found = re.match(
        r"RuntimeError: ranks have different plans for one step: its hash is (0x[0-9a-f]+) on rank 0 and "
        r"(0x[0-9a-f]+) on rank 1 of the ranks",
        errors[0],
    )
    assert found
    assert found[1] != found[2]


def _plans_of_other_loads(loads: list[list[int]]) -> list[int]:
    shuffler = FieldShuffler(verify=True)
    fingerprints = []
    for of_step in loads:
        batch = _batch()
        batch.workload = torch.tensor(of_step) * (1 + dist.get_rank())
        fingerprints.append(shuffler.plan(batch).fingerprint)
    return fingerprints


def test_equal_plans_and_only_these_have_equal_hashes(pools):
    first, *others = pools(2).run(_plans_of_other_loads, [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]])
    assert [first] == others
    assert first[0] == first[2] != first[1]


class LossyShuffler(FieldShuffler):
    """On rank 1, the exchange drops or doubles a sample."""

    def __init__(self, exchange: str, change: int) -> None:
        super().__init__(exchange=exchange, verify=True)
        if dist.get_rank() == 1:
            whole = EXCHANGES[exchange]

            def move(rows, plan, group):
                moved = whole.move(rows, plan, group)
                return select_from([moved], np.arange(moved.num_rows + change) % moved.num_rows)

            self._exchange = Exchange(move, whole.traffic)


def _lost(exchange: str, change: int) -> str:
    shuffler = LossyShuffler(exchange, change)
    batch = _batch()
    plan = shuffler.plan(batch)
    assert plan.moves
    return _error(shuffler.exchange, batch, plan)


@pytest.mark.parametrize("exchange", BOTH)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_sample_that_one_rank_loses_or_doubles_is_an_error_on_all(pools, exchange, change):
    errors = pools(3).run(_lost, exchange, change)
    expected = (
        f"RuntimeError: rank 1 of the ranks to balance among has {4 + change} samples after the exchange, "
        "planned were 4"
    )
    assert errors == [expected] * 3


class Unpicklable(Exception):
    def __init__(self, one, two) -> None:
        super().__init__(f"{one} and {two}")
        self.held = lambda: None


class RaisingShuffler(FieldShuffler):
    """On rank 1, placing raises from the second step on; after that it works again."""

    def __init__(self, error: Exception) -> None:
        super().__init__(verify=True)
        self.errors = [None, error, None]

    def _placed(self, gathered):
        error = self.errors.pop(0)
        if error is not None and dist.get_rank() == 1:
            raise error
        return super()._placed(gathered)


def _placing_raises(unpicklable: bool) -> list[str]:
    error = Unpicklable("this", "that") if unpicklable else LookupError("no such placement")
    shuffler = RaisingShuffler(error)
    return [_error(shuffler.plan, _batch()) for _ in range(3)]


def test_an_error_of_placing_on_one_rank_is_raised_on_all(pools):
    results = pools(3).run(_placing_raises, False)
    for rank, (first, error, after) in enumerate(results):
        assert first == after == "no error"
        assert error.startswith("LookupError: no such placement")
        assert rank == 1 or "raised on rank 1:" in error


def test_an_error_that_cannot_be_sent_reaches_the_others_in_words(pools):
    elsewhere, here, _ = [errors[1] for errors in pools(3).run(_placing_raises, True)]
    assert here.startswith("Unpicklable: this and that")
    assert elsewhere.startswith("RuntimeError: Unpicklable: this and that")
