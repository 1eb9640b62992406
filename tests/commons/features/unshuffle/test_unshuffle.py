"""Outputs of all kinds come back; values that do not fit the plan are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.loaded_batches import agreed, check_identical, lopsided_batch, sample_ids
from tests.commons.distributed.shufflers import FieldShuffler
from tests.drawn_batches import draw_batch


def _after_the_last_batch() -> None:
    shuffler = agreed(FieldShuffler(verify=True))
    plan = shuffler.plan(None)
    assert not plan.has_batch
    padding = shuffler.padding_batch()
    moved = shuffler.exchange(padding, plan)
    check_identical(moved, padding)
    check_identical(shuffler.unshuffle(moved, plan), padding)
    check_identical(shuffler.unshuffle(torch.ones(1, 2), plan), torch.zeros(1, 2))


def _other_outputs() -> None:
    shuffler = agreed(FieldShuffler())
    batch = lopsided_batch()
    plan = shuffler.plan(batch)
    assert plan.moves
    ids = shuffler.exchange(batch, plan).matrix[:, 0, 0]
    learned = (ids * torch.ones((), dtype=ids.dtype, requires_grad=True))[:, None]
    assert shuffler.unshuffle(learned, plan)[:, 0].tolist() == sample_ids(batch)
    assert shuffler.unshuffle(learned.cfloat(), plan)[:, 0].real.tolist() == sample_ids(batch)
    transposed = torch.stack([ids, -ids]).T
    assert shuffler.unshuffle(transposed, plan)[:, 1].tolist() == [-s for s in sample_ids(batch)]
    without_bytes = torch.zeros(int(plan.rows[dist.get_rank()]), 0)
    assert shuffler.unshuffle(without_bytes, plan).shape == (4, 0)


@pytest.mark.parametrize("run", [_after_the_last_batch, _other_outputs])
def test_padding_and_unusual_tensors_come_back(pools, run: Callable[[], None]):
    pools(2).run(run)


def _errors(cap: int | None) -> tuple[list[str], int]:
    """Returns the errors of wrong values, and how many micro-batches the plan has."""
    shuffler = agreed(FieldShuffler(max_tokens_per_micro_batch=cap))
    plan = shuffler.plan(lopsided_batch() if cap else draw_batch(np.random.default_rng(0), 0, 4, 3))
    rank = dist.get_rank()
    wrong: list[Any]
    if cap is None:
        real = int(plan.num_placed[rank])
        wrong = [
            torch.zeros(5),
            torch.zeros(real - 1),
            JaggedTensor(torch.zeros(0), lengths=torch.zeros(7).int()),
            {"rows": torch.zeros(4), "samples": torch.zeros(real)},
            torch.zeros(()),
        ]
    else:
        values = [torch.zeros(len(rows)) for rows in plan.micro_batches_on(rank)]
        assert plan.num_micro_batches == len(values) > 1
        wrong = [
            values[1:],
            [*values, torch.zeros(1)],
            [],
            [*values[:-1], torch.zeros(len(values[-1]) + 7)],
            [*values[:-1], values[-1].int()],
        ]
    return [error_of(shuffler.unshuffle, given, plan) for given in wrong], plan.num_micro_batches


ERRORS: dict[int | None, list[str]] = {
    None: [
        "unshuffle got 5 rows in 'values', expected 4, as the exchange gave this rank, or 3 without",
        "got 2 rows",
        "got 7 rows",
        "got 3 rows in 'samples'",
        "0-d",
    ],
    13: [
        "values of {fewer} micro-batches, the plan has {count}",
        "values of {more} micro-batches, the plan has {count}",
        "values of 0 micro-batches, the plan has {count}",
        "rows in 'values', expected",
        "unshuffle got other values of micro-batch {fewer} than of the first: ",
    ],
}


@pytest.mark.parametrize("cap", ERRORS)
def test_values_of_other_rows_or_micro_batches_are_refused(pools, cap):
    for errors, count in pools(2).run(_errors, cap):
        for error, expected in zip(errors, ERRORS[cap], strict=True):
            assert error.startswith("ValueError")
            assert expected.format(count=count, fewer=count - 1, more=count + 1) in error


def test_a_rank_alone_gets_its_rows_back_with_padding():
    batch = draw_batch(np.random.default_rng(0), 0, 4, 3)
    shuffler = FieldShuffler()
    plan = shuffler.plan(batch)
    assert torch.equal(shuffler.unshuffle(batch.small, plan), batch.small)
    assert torch.equal(shuffler.unshuffle(batch.small[:3], plan), batch.small)
    with pytest.raises(ValueError, match="unshuffle got 99 rows"):
        shuffler.unshuffle(torch.ones(99), plan)


def _values_of_kinds() -> tuple[bool, list[str]]:
    """Returns whether dicts in two orders come back, and the errors of values that differ between ranks."""
    rank, shuffler = dist.get_rank(), agreed(FieldShuffler())
    batch = lopsided_batch()
    plan = shuffler.plan(batch)
    ids = shuffler.exchange(batch, plan).matrix[:, 0, 0].clone()
    ones = torch.ones(len(ids), dtype=torch.int32)
    named = {"positive": ids, "negative": -ids}
    returned = shuffler.unshuffle(dict(reversed(named.items())) if rank else named, plan)
    keys = ["p", "q"] if rank else ["q", "p"]
    of_ranks: list[Any] = [
        ids.float() if rank else ids.float().view(torch.int32),
        ids[:, None].expand(-1, 2 - rank).reshape(-1, 2 - rank),
        {"score" if rank else "scores": ids},
        KeyedJaggedTensor(keys, torch.cat([ids, ids]), lengths=torch.cat([ones, ones])),
        JaggedTensor(ids, lengths=ones.long() if rank else ones),
    ]
    errors = [error_of(shuffler.unshuffle, values, plan) for values in of_ranks]
    again = shuffler.unshuffle(named, plan)  # after errors of all ranks, the next call is like any other
    expected = sample_ids(batch)
    comes_back = all(
        values["positive"].tolist() == expected and values["negative"].tolist() == [-s for s in expected]
        for values in (returned, again)
    )
    return comes_back, errors


def test_values_of_another_kind_on_one_rank_are_refused_on_all_and_the_order_of_names_is_not(pools):
    results = pools(2).run(_values_of_kinds)
    assert results[0] == results[1]
    comes_back, errors = results[0]
    assert comes_back
    differences = [
        "field '' has dtype torch.float32, expected torch.int32",
        "field '' has trailing_shape (1,), expected (2,)",
        "field 'scores' is missing",
        "field '' has keys ('p', 'q'), expected ('q', 'p')",
        "field '' has lengths_dtype torch.int64, expected torch.int32",
    ]
    for error, difference in zip(errors, differences, strict=True):
        assert error.startswith("ValueError: unshuffle got other values on rank 1 than on rank 0: ")
        assert difference in error
