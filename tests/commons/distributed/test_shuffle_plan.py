"""Parts of a plan, on plans drawn at random, without processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import torch
from hypothesis import given

from commons.distributed import ShufflePlan
from commons.distributed.exchange import route_of
from commons.sequence_batch.row_schema import Field, Schema
from tests.commons.distributed.drawn_plans import plans


@given(plan=plans())
def test_a_plan_moves_rows_unless_all_stay_where_they_were_loaded(plan):
    places = [plan.rows.where_loaded(row) for row in range(len(plan.rows.workloads))]
    assert plan.moves == any(rank != to for (rank, _), to in zip(places, plan.destination, strict=True))
    assert not replace(plan, destination=plan.rows.home).moves
    placed = np.concatenate([plan.computed_by(rank) for rank in range(plan.num_ranks)])
    assert np.array_equal(placed, np.concatenate(plan.partition))
    assert sorted(placed.tolist()) == list(range(len(places)))


@given(plan=plans())
def test_both_ends_of_a_route_agree(plan):
    fields = [Field(name, "jagged", ("",), torch.int64, ()) for name in ("ids", "labels")]
    schema = Schema(tuple(fields))
    routes = [route_of(plan, rank, schema, "all_to_all") for rank in range(plan.num_ranks)]
    for here, route in enumerate(routes):
        if not plan.moves:
            assert route.leaving is None
            continue
        for there, other in enumerate(routes):
            moving = (plan.rows.home == here) & (plan.destination == there)
            lengths = plan.rows.key_lengths[moving]
            num_bytes = route.sent_bytes[there]
            assert num_bytes == other.received_bytes[here]
            assert num_bytes == (0 if here == there else 8 * lengths.sum())
            if here != there:
                arriving = dict(other.arriving).get(here, lengths[:0])
                assert np.array_equal(arriving, lengths)


def _changes(plan: ShufflePlan) -> Iterator[tuple[str, ShufflePlan]]:
    """Changes one number in each array of a plan, by the array's name."""

    def changed(array: np.ndarray) -> np.ndarray:
        other = array.copy()
        last = other.reshape(-1)[-1:]
        last[:] = ~last if other.dtype == bool else _one_more(last)
        return other

    for of, make in (
        (plan, replace),
        (plan.rows, lambda rows, **new: replace(plan, rows=replace(rows, **new))),
    ):
        for field in fields(of):
            value = getattr(of, field.name)
            if isinstance(value, np.ndarray) and value.size:
                yield field.name, make(of, **{field.name: changed(value)})
    for name, column in plan.rows.columns.items():
        if column.size:
            columns = {**plan.rows.columns, name: changed(column)}
            yield name, replace(plan, rows=replace(plan.rows, columns=columns))
    yield "num_parts", replace(plan, num_parts=plan.num_parts + 1)


def _one_more(array: np.ndarray) -> np.ndarray:
    if array.dtype.names is None:
        return array + 1
    other = array.copy()
    other[array.dtype.names[-1]] += 1
    return other


@given(plan=plans())
def test_only_plans_with_equal_arrays_are_equal_and_have_equal_fingerprints(plan):
    copied = pickle.loads(pickle.dumps(plan))
    assert copied == plan and copied.fingerprint == plan.fingerprint
    for name, other in _changes(plan):
        assert other != plan and other.fingerprint != plan.fingerprint, name
