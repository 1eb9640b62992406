"""The numbers of rows: taken apart, never changed."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from commons.distributed.row_table import RowTable
from tests.commons.distributed.drawn_plans import tables


def _check_equal(got: RowTable, expected: RowTable) -> None:
    for field in dataclasses.fields(RowTable):
        mine, other = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "columns":
            assert list(mine) == list(other)
            for name in mine:
                np.testing.assert_array_equal(mine[name], other[name], err_msg=name)
        elif isinstance(mine, np.ndarray):
            np.testing.assert_array_equal(mine, other, err_msg=field.name)
        else:
            assert mine == other, field.name
    assert len(got.arrays()) == len(expected.arrays())


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
    assert np.array_equal(taken.workloads, numbers)
    assert np.array_equal(taken.home, rows.home[numbers])
    # Padding stays, too.
    assert np.array_equal(taken.batch_sizes - taken.num_loaded, rows.batch_sizes - rows.num_loaded)
    for name in ("tokens", "key_lengths", "row_counts", "work", "starts_sample"):
        assert np.array_equal(getattr(taken, name), getattr(rows, name)[numbers]), name
    for name, column in rows.columns.items():
        assert np.array_equal(taken.columns[name], column[numbers])
    _check_equal(rows.take(np.arange(len(rows.home))), rows)


@given(drawn=tables())
def test_nobody_changes_a_table_in_place(drawn):
    rows, _ = drawn
    for array in rows.arrays():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = np.zeros((), dtype=array.dtype)
    column = np.arange(3)
    replace(RowTable.empty(1), columns={"user": column})
    column[0] = 7  # whoever made it goes on with it
