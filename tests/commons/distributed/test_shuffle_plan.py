"""Tables of rows and plans, drawn at random, without processes."""

import pickle
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commons.distributed import ShufflePlan
from tests.commons.distributed.internals import RowTable, route_of
from tests.commons.sequence_batch.internals import Field, Schema

PIECE = np.dtype([("first", np.int64), ("last", np.int64)])


@st.composite
def tables(draw) -> tuple[RowTable, np.random.Generator]:
    """Draws a table of whole samples and pieces, whose workloads are the rows' numbers, and a generator."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    num_ranks = draw(st.integers(1, 5))
    batch_sizes = rng.integers(0, 5, num_ranks)
    num_loaded = rng.integers(0, batch_sizes + 1)
    count = int(num_loaded.sum())
    starts_sample = rng.random(count) < 0.7
    starts_sample[(np.cumsum(num_loaded) - num_loaded)[num_loaded > 0]] = True
    pieces = np.zeros(count, dtype=PIECE)
    pieces["first"], pieces["last"] = rng.integers(0, 9, (2, count))
    rows = RowTable(
        batch_sizes=batch_sizes,
        num_loaded=num_loaded,
        workloads=np.arange(count),
        tokens=rng.integers(0, 9, count),
        loss_tokens=rng.integers(0, 9, count),
        key_lengths=rng.integers(0, 9, (count, 2)),
        sample_bytes=rng.integers(1, 99, count),
        work=rng.integers(0, 9, (count, 2)),
        starts_sample=starts_sample,
        columns={"user": rng.integers(-9, 9, count), "pieces": pieces, "pairs": rng.random((count, 2))},
        speeds=None if rng.random() < 0.5 else 1 + rng.random(num_ranks),
        ranks_per_node=None if rng.random() < 0.5 else 1,
    )
    return rows, rng


@st.composite
def plans(draw) -> ShufflePlan:
    """Draws a plan."""
    rows, rng = draw(tables())
    destination = rng.integers(0, rows.num_ranks, len(rows.home))
    return ShufflePlan(
        rows,
        destination,
        num_rows=np.maximum(np.bincount(destination, minlength=rows.num_ranks), 1),
        predicted_seconds=None if rng.random() < 0.5 else rng.random(rows.num_ranks),
        num_parts=int(rng.integers(0, 5)),
    )


@given(drawn=tables())
def test_rows_know_where_they_were_loaded(drawn):
    rows, _ = drawn
    row_of, sample = {}, -1
    for number, (rank, starts) in enumerate(zip(rows.home.tolist(), rows.starts_sample, strict=True)):
        row_of[rank] = row_of.get(rank, -1) + int(starts)
        sample += int(starts)
        assert rows.where_loaded(number) == (rank, row_of[rank])
        assert rows.sample_of[number] == sample
    loaded = [rows.loaded_by(rank) for rank in range(rows.num_ranks)]
    assert np.array_equal(np.concatenate(loaded), np.arange(len(rows.home)))
    assert [len(of_rank) for of_rank in loaded] == rows.num_loaded.tolist()


@given(drawn=tables())
def test_taken_rows_stay_with_the_ranks_that_loaded_them(drawn):
    rows, rng = drawn
    numbers = np.repeat(np.arange(len(rows.home)), rng.integers(0, 4, len(rows.home)))
    taken = rows.take(numbers)
    # Padding stays, too.
    assert np.array_equal(taken.batch_sizes - taken.num_loaded, rows.batch_sizes - rows.num_loaded)
    for name in ("workloads", "home", "tokens", "key_lengths", "work", "starts_sample"):
        assert np.array_equal(getattr(taken, name), getattr(rows, name)[numbers]), name
    for name, column in rows.columns.items():
        assert np.array_equal(taken.columns[name], column[numbers]), name
    all_taken = rows.take(np.arange(len(rows.home)))
    assert list(all_taken.columns) == list(rows.columns)
    for mine, other in zip(all_taken.arrays(), rows.arrays(), strict=True):
        np.testing.assert_array_equal(mine, other)


@given(drawn=tables())
def test_nobody_changes_a_table_in_place(drawn):
    rows, _ = drawn
    for array in rows.arrays():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = np.zeros((), dtype=array.dtype)
    column = np.arange(3)
    replace(RowTable.empty(1), columns={"user": column})
    column[0] = 7  # whoever made it goes on with it


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
    keys = [Field(name, "jagged", ("",), torch.int64, ()) for name in ("ids", "labels")]
    schema = Schema(tuple(keys))
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
    """Changes the last byte of each array of a plan, by the array's name."""

    def changed_arrays(arrays: dict[str, object]) -> Iterator[tuple[str, np.ndarray]]:
        for name, value in arrays.items():
            if isinstance(value, np.ndarray) and value.size:
                other = value.copy()
                other.reshape(-1).view(np.uint8)[-1] ^= 1
                yield name, other

    rows = plan.rows
    for name, array in changed_arrays({field.name: getattr(plan, field.name) for field in fields(plan)}):
        yield name, replace(plan, **{name: array})
    for name, array in changed_arrays({field.name: getattr(rows, field.name) for field in fields(rows)}):
        yield name, replace(plan, rows=replace(rows, **{name: array}))
    for name, array in changed_arrays(dict(rows.columns)):
        yield name, replace(plan, rows=replace(rows, columns={**rows.columns, name: array}))
    yield "num_parts", replace(plan, num_parts=plan.num_parts + 1)


@given(plan=plans())
def test_only_plans_with_equal_arrays_are_equal(plan):
    assert pickle.loads(pickle.dumps(plan)) == plan
    for name, other in _changes(plan):
        assert other != plan, name
