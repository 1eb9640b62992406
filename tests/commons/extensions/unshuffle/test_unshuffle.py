"""Outputs of all kinds come back; values that do not fit the plan are refused."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commons.distributed import BatchShuffler, ShufflePlan
from commons.extensions.unshuffle import Unshuffle
from tests.commons.distributed.container_batches import KINDS, ContainerShuffler, contents, make_batch
from tests.commons.distributed.counted_collectives import (
    no_synchronization,
    recorded_collectives,
)
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.loaded_batches import (
    BOTH,
    agreed,
    check_identical,
    expected_outputs,
    lopsided_batch,
    model_outputs,
    sample_ids,
)
from tests.commons.distributed.shufflers import Case, FieldShuffler, cases, exchanged
from tests.drawn_batches import draw_batch
from tests.few_examples import few_examples
from tests.on_ranks import on_ranks


def back_of(shuffler: BatchShuffler) -> Callable[[Any, ShufflePlan], Any]:
    """Returns the way back of a shuffler."""
    (unshuffle,) = shuffler.extensions
    assert isinstance(unshuffle, Unshuffle)
    return unshuffle.unshuffle


def returning() -> FieldShuffler:
    return FieldShuffler(extensions=[Unshuffle()])


FIELDS = ("scores", "keyed", "tokens", "right")  # of the outputs


def _there_and_back(case: Case, padded: bool) -> None:
    """Checks that a batch comes back, and outputs, all together and one field alone."""
    step, alone = exchanged(case), FIELDS[case.seed % len(FIELDS)]
    if step is None:
        return
    shuffler, plan, brought, moved = step
    check_identical(back_of(shuffler)(moved, plan), brought)
    outputs, expected = model_outputs(moved, padded), expected_outputs(brought)
    check_identical(back_of(shuffler)(outputs, plan), expected)
    check_identical(back_of(shuffler)(outputs[alone], plan), expected[alone], alone)


@few_examples
@given(
    case=st.sampled_from([2, 3, 3, 4]).flatmap(lambda ranks: cases(ranks, extensions=[[Unshuffle()]])),
    padded=st.booleans(),
)
def test_results_come_back_to_their_rows(pools, case, padded):
    pools(len(case.batches)).run(_there_and_back, case, padded)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(3)
def test_any_container_comes_back_to_ranks_with_and_without_a_batch(kind):
    rank = dist.get_rank()
    for exchange, equal_rows, of_last in product(BOTH, (True, False), (4, None)):
        shuffler = ContainerShuffler(exchange=exchange, equal_rows=equal_rows, extensions=[Unshuffle()])
        rows = (5, 2, of_last)[rank]
        batch = None if rows is None else make_batch(kind, 0, 1000 * (rank + 1), rows)
        plan = shuffler.plan(batch)
        brought = shuffler.padding_batch() if batch is None else batch
        back = back_of(shuffler)(shuffler.exchange(brought, plan), plan)
        if batch is None:
            assert contents(back) == []
        else:
            check_identical(*((vars(back), vars(batch)) if kind == "torchrec" else (back, batch)))


@on_ranks(2)
def test_padding_comes_back_after_the_last_batch():
    shuffler = agreed(returning())
    plan = shuffler.plan(None)
    assert not plan.has_batch
    padding = shuffler.padding_batch()
    moved = shuffler.exchange(padding, plan)
    check_identical(moved, padding)
    check_identical(back_of(shuffler)(moved, plan), padding)
    check_identical(back_of(shuffler)(torch.ones(1, 2), plan), torch.zeros(1, 2))


@on_ranks(2)
def test_values_of_other_rows_are_refused():
    shuffler = agreed(returning())
    plan = shuffler.plan(draw_batch(np.random.default_rng(0), 0, 4, 3))
    real = int(plan.num_placed[dist.get_rank()])
    for values, expected in (
        (torch.zeros(5), "got 5 rows in 'values', expected 4, as the exchange gave this rank, or 3 without"),
        ({"rows": torch.zeros(4), "samples": torch.zeros(real)}, "got 3 rows in 'samples'"),
    ):
        error = error_of(back_of(shuffler), values, plan)
        assert error.startswith("ValueError") and expected in error


def test_a_rank_alone_gets_its_rows_back_with_padding():
    batch = draw_batch(np.random.default_rng(0), 0, 4, 3)
    shuffler = returning()
    plan = shuffler.plan(batch)
    check_identical(back_of(shuffler)(batch, plan), batch)
    assert torch.equal(back_of(shuffler)(batch.small, plan), batch.small)
    assert torch.equal(back_of(shuffler)(batch.small[:3], plan), batch.small)


@on_ranks(2)
def test_values_of_another_kind_on_one_rank_are_refused_on_all_and_the_order_of_names_is_not():
    rank, shuffler = dist.get_rank(), agreed(returning())
    batch = lopsided_batch()
    plan = shuffler.plan(batch)
    ids = shuffler.exchange(batch, plan).matrix[:, 0, 0].clone()
    learned = ids * torch.ones((), dtype=ids.dtype, requires_grad=True)
    named = {"positive": learned, "negative": -learned}
    returned = back_of(shuffler)(dict(reversed(named.items())) if rank else named, plan)
    for values, difference in (
        (
            ids.float() if rank else ids.float().view(torch.int32),
            "has dtype torch.float32, expected torch.int32",
        ),
        (ids[:, None].expand(-1, 2 - rank).reshape(-1, 2 - rank), "has trailing_shape (1,), expected (2,)"),
        ({"score" if rank else "scores": ids}, "field 'scores' is missing"),
    ):
        error = error_of(back_of(shuffler), values, plan)
        assert error.startswith("ValueError: unshuffle got other values on rank 1 than on rank 0: ")
        assert difference in error
    again = back_of(shuffler)(named, plan)  # after errors of all ranks, the next call is like any other
    expected = sample_ids(batch)
    for values in (returned, again):
        assert values["positive"].tolist() == expected
        assert values["negative"].tolist() == [-sample for sample in expected]


def _collectives_of_unshuffle() -> list[list[str]]:
    """Returns the collectives of a first call for each kind of values, and of a second one."""
    shuffler = agreed(returning())
    batch = lopsided_batch()
    plan = shuffler.plan(batch)
    moved = shuffler.exchange(batch, plan)
    kinds = moved.small, {"small": moved.small, "matrix": moved.matrix}, moved.weighted, moved
    counted = []
    for values in (*kinds, *kinds):
        with recorded_collectives() as calls:
            back_of(shuffler)(values, plan)
        counted.append([name for name, _ in calls])
    with no_synchronization():
        back_of(shuffler)(moved.small[: moved.num_samples].clone(), plan)
    return counted


def test_unshuffle_takes_one_collective_and_one_more_for_lengths_and_for_a_first_call(pools):
    one, two = ["all_to_all_single"], ["all_to_all_single"] * 2
    later = [one, one, two, two]
    first = [["all_gather", *calls] for calls in later]
    assert pools(2).run(_collectives_of_unshuffle) == [first + later] * 2
