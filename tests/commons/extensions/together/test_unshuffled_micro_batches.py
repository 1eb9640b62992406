"""Results of micro-batches come back to the rows that were loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commons.distributed import BatchShuffler, Extension, ShufflePlan
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.unshuffle import Unshuffle
from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.loaded_batches import (
    BOTH,
    agreed,
    check_identical,
    expected_outputs,
    lopsided_batch,
    model_outputs,
)
from tests.commons.distributed.shufflers import Case, FieldShuffler, cases, exchanged
from tests.commons.extensions.micro_batches.internals import rows_of_micro_batches
from tests.few_examples import few_examples
from tests.on_ranks import on_ranks


def extensions_with(cap: int | None) -> list[Extension]:
    return [Unshuffle(), *([] if cap is None else [MicroBatches(cap)])]


def _extension(shuffler: BatchShuffler, kind: type) -> Any:
    return next((extension for extension in shuffler.extensions if isinstance(extension, kind)), None)


def divided(shuffler: BatchShuffler, batch: Any, plan: ShufflePlan) -> list[Any]:
    extension = _extension(shuffler, MicroBatches)
    return [batch] if extension is None else extension.micro_batches(batch, plan)


def back(shuffler: BatchShuffler, values: list[Any], plan: ShufflePlan) -> Any:
    extension = _extension(shuffler, MicroBatches)
    joined = values[0] if extension is None else extension.join_values(values, plan)
    return _extension(shuffler, Unshuffle).unshuffle(joined, plan)


CAPS = [1, 6, 12, 13, 30, 10**6]


def _there_and_back(case: Case, padded: bool) -> None:
    step = exchanged(case)
    if step is None:
        return
    shuffler, plan, brought, moved = step
    parts = divided(shuffler, moved, plan)
    check_identical(back(shuffler, parts, plan), brought)
    of_each, expected = [model_outputs(one, padded) for one in parts], expected_outputs(brought)
    check_identical(back(shuffler, of_each, plan), expected)
    for alone in ("scores", "keyed", "tokens", "right"):
        values = [of_one[alone] for of_one in of_each]
        check_identical(back(shuffler, values, plan), expected[alone], alone)


@few_examples
@given(
    case=st.sampled_from([2, 3, 3, 4]).flatmap(
        lambda ranks: cases(ranks, extensions=[extensions_with(cap) for cap in CAPS])
    ),
    padded=st.booleans(),
)
def test_results_come_back_to_their_rows(pools, case, padded):
    pools(len(case.batches)).run(_there_and_back, case, padded)


@on_ranks(2)
def test_values_of_other_micro_batches_are_refused():
    shuffler = agreed(FieldShuffler(extensions=extensions_with(13)))
    plan = shuffler.plan(lopsided_batch())
    values = [torch.zeros(len(rows)) for rows in rows_of_micro_batches(plan, dist.get_rank())]
    count = plan.num_parts
    assert count == len(values) > 1
    for wrong, words in (
        (values[1:], f"values of {count - 1} micro-batches, the plan has {count}"),
        ([*values[:-1], torch.zeros(len(values[-1]) + 7)], "give join_values a row for each row of the part"),
        ([*values[:-1], values[-1].int()], f"batches 0 and {count - 1} differ: "),
        ([[each, each] for each in values], "list of 2 similar entries"),
    ):
        assert words in error_of(back, shuffler, wrong, plan)


def _collectives_back(exchange: str, cap: int | None) -> list[list[str]]:
    shuffler = agreed(FieldShuffler(exchange=exchange, extensions=extensions_with(cap)))
    batch = lopsided_batch()
    plan = shuffler.plan(batch)
    micro_batches = divided(shuffler, shuffler.exchange(batch, plan), plan)
    assert plan.moves and (len(micro_batches) > 1) == (cap is not None)
    counted = []
    for values in (micro_batches, [micro_batch.small for micro_batch in micro_batches]):
        with recorded_collectives() as calls:
            back(shuffler, values, plan)
        counted.append([name for name, _ in calls])
    return counted


@pytest.mark.parametrize("exchange", BOTH)
def test_the_way_back_takes_as_many_collectives_as_for_a_whole_batch(pools, exchange):
    whole, divided = (pools(3).run(_collectives_back, exchange, cap) for cap in (None, 13))
    assert divided == whole and all(map(len, whole[0]))
