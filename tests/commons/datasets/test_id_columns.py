"""Columns of ids in tables: any integers in their range are read, and others are named by feature and row."""

import numpy as np
import polars as pl
import pytest

from commons.datasets import SequencesMeta, UserSequences

HASHES = [[1 - 2**63, 7], [2**63 - 1, 2**31]]


def read(items, ages=(1, 2), unbounded=(), num_items=100):
    """Reads users' events, each with action 1; returns the ids of items and users, one after the other."""
    table = pl.DataFrame({"items": items, "age": ages})
    actions = [[1] * len(row) if isinstance(row, list) else [1] for row in table["items"].to_list()]
    sizes = {"age": 4, "product": num_items, "stars": 6}
    meta = SequencesMeta(
        "shop", ["age"], "product", "stars", sizes, 5, 3, unbounded_feature_names=list(unbounded)
    )
    sequences = UserSequences.from_table(table.with_columns(actions=pl.Series(actions)), meta)
    assert sequences.contextual["age"].dtype == sequences.offsets.dtype == np.int64
    return sequences.items, sequences.contextual["age"].tolist()


@pytest.mark.parametrize("dtype", [pl.UInt8, pl.UInt16, pl.Int16, pl.UInt32, pl.Int32, pl.Int64, pl.UInt64])
def test_ids_of_any_integer_type_are_read(dtype):
    items, ages = pl.Series([[3, 99], [0]], dtype=pl.List(dtype)), pl.Series([3, 0], dtype=dtype)
    found, found_ages = read(items, ages)
    assert found.dtype == np.int32 and found.tolist() == [3, 99, 0]
    assert found_ages == [3, 0]


def test_hashes_and_large_ids_need_a_vocabulary_that_takes_them():
    large = [[2**31, 5], [2**40]]
    for items, vocabulary in ((large, {"num_items": 2**41}), (HASHES, {"unbounded": ["product"]})):
        found, _ = read(items, **vocabulary)
        assert found.dtype == np.int64 and found.tolist() == [*items[0], *items[1]]


# Items and ages of two users, features without bounds, and what the error shows.
@pytest.mark.parametrize(
    ("items", "ages", "unbounded", "expected"),
    [
        ([3], [1], [], ["Int64", "lists of integers"]),
        ([[1.0]], [1], [], ["List(Float64)", "integers"]),
        ([[1], None], [1, 1], [], ["row 1", "null"]),
        ([[1], []], [1, 1], [], ["row 1", "empty"]),
        ([[1], [4, 100]], [1, 1], [], ["row 1", "'product'", "id 100", "0 to 99"]),
        ([[1], [-7]], [1, 1], [], ["id -7", "unbounded_feature_names"]),
        ([[2**31, 5]], [1], [], ["row 0", "unbounded_feature_names"]),
        (pl.Series([[2**64 - 1]], dtype=pl.List(pl.UInt64)), [1], [], ["row 0", f"{2**64 - 1}"]),
        ([[-(2**63)]], [1], ["product"], ["row 0", f"{-(2**63)}"]),
        ([[1]], [1], ["stars"], ["unbounded_feature_names = ['stars']"]),
        ([[1]], ["x"], [], ["'age'", "String", "integers"]),
        ([[1], [2]], [1, None], [], ["row 1", "'age'", "null"]),
        ([[1], [2]], [3, 4], [], ["row 1", "'age'", "id 4", "0 to 3"]),
    ],
)
def test_ids_that_are_refused(items, ages, unbounded, expected):
    with pytest.raises(ValueError) as refused:
        read(items, ages, unbounded)
    assert all(text in str(refused.value) for text in expected), refused.value
