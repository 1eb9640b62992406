"""Columns of ids in tables: any integers in their range are read, and others are named by feature and row."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from commons.datasets import ItemSIDs, SequencesMeta, SIDSequenceSource, UserSequences
from commons.datasets.sid_batch import SIDDatasetSpec

NUM_ITEMS, NUM_AGES = 100, 4
CODES = np.random.default_rng(0).integers(0, 8, (NUM_ITEMS, 2))
OF_LISTS = {"events": ("items", "product"), "semantic IDs": ("sequence_data", "sequence_data")}


def events(table: pl.DataFrame, folder: Path, unbounded: tuple[str, ...] = (), num_items: int = NUM_ITEMS):
    """Reads users' events, each with action 1; returns the ids of items and users, one after the other."""
    if table["items"].dtype == pl.List:
        actions = [None if row is None else [1] * len(row) for row in table["items"]]
        table = table.with_columns(pl.Series("actions", actions, dtype=pl.List(pl.Int8)))
    else:
        table = table.with_columns(actions=[1])
    sizes = {"age": NUM_AGES, "product": num_items, "stars": 6}
    meta = SequencesMeta(
        "shop", ["age"], "product", "stars", sizes, 5, 3, unbounded_feature_names=list(unbounded)
    )
    sequences = UserSequences.from_table(table, meta)
    assert sequences.contextual["age"].dtype == sequences.offsets.dtype == np.int64
    return sequences.items, sequences.contextual["age"]


def semantic_ids(table: pl.DataFrame, folder: Path):
    """Reads a file of sequences; returns the codes of items and the ids of users, one after the other."""
    table.write_parquet(folder / "training.parquet")
    sids = ItemSIDs(np.arange(NUM_ITEMS), CODES)
    source = SIDSequenceSource(
        folder / "training.parquet", sids, SIDDatasetSpec((8, 8), 9, contextual_vocab_sizes={"age": NUM_AGES})
    )
    read = [source[row] for row in range(len(source))]
    ages = np.concatenate([sample.contextual["age"] for sample in read])
    return np.concatenate([sample.codes for sample in read]), ages


READERS = {"events": events, "semantic IDs": semantic_ids}
INTEGERS = [pl.UInt8, pl.UInt16, pl.Int16, pl.UInt32, pl.Int32, pl.Int64, pl.UInt64]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_ids_of_any_integer_type_are_read(dtype, reader, tmp_path):
    lists = pl.Series(OF_LISTS[reader][0], [[3, 99], [0]], dtype=pl.List(dtype))
    found, ages = READERS[reader](pl.DataFrame([lists, pl.Series("age", [3, 0], dtype=dtype)]), tmp_path)
    items = np.array([3, 99, 0])
    np.testing.assert_array_equal(found, items if reader == "events" else CODES[items])
    assert ages.tolist() == [3, 0] and ages.dtype == np.int64


# Items and ages of two users, and what the error shows.
REFUSED = {
    "no lists": ([3], [1], "Int64", "lists of integers"),
    "floats": ([[1.0]], [1], "List(Float64)", "integers"),
    "texts": ([["1"]], [1], "List(String)", "integers"),
    "no row": ([[1], None], [1, 1], "row 1", "null"),
    "no item": ([[1], [2, None]], [1, 1], "row 1", "null"),
    "empty row": ([[1], []], [1, 1], "row 1", "empty"),
    "unknown item": ([[1], [4, 100]], [1, 1], "row 1", "100"),
    "negative item": ([[1, 2], [-7]], [1, 1], "row 1", "-7"),
    "beyond int64": (
        pl.Series([[1], [2**64 - 1]], dtype=pl.List(pl.UInt64)),
        [1, 1],
        "row 1",
        f"{2**64 - 1}",
    ),
    "text as age": ([[1]], ["x"], "'age'", "String", "integers"),
    "flag as age": ([[1]], [True], "'age'", "Boolean", "integers"),
    "fraction as age": ([[1]], [0.5], "'age'", "Float64", "integers"),
    "no age": ([[1], [2]], [1, None], "row 1", "'age'", "null"),
    "unknown age": ([[1], [2]], [3, 4], "row 1", "'age'", "id 4", "0 to 3"),
    "negative age": ([[1], [2]], [3, -1], "row 1", "'age'", "id -1", "0 to 3"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("columns", REFUSED.values(), ids=REFUSED)
def test_ids_that_are_refused(columns, reader, tmp_path):
    lists, ages, *expected = columns
    name, feature = OF_LISTS[reader]
    with pytest.raises(ValueError) as refused:
        READERS[reader](pl.DataFrame({name: lists, "age": ages}), tmp_path)
    error = str(refused.value)
    is_item_missing = "no semantic ID" in error
    assert "'age'" in expected or is_item_missing or repr(name) in error or repr(feature) in error
    assert all(text in error for text in expected), error
    assert reader == "events" or str(tmp_path / "training.parquet") in error


def test_hashes_and_large_ids_need_a_vocabulary_that_takes_them(tmp_path):
    large, hashes = [[2**31, 5], [2**40]], [[-(2**63) + 1, 7], [2**63 - 1, 2**31]]
    ages = {"age": [1, 2]}
    items, _ = events(pl.DataFrame({"items": large, **ages}), tmp_path, num_items=2**41)
    assert items.tolist() == [2**31, 5, 2**40] and items.dtype == np.int64
    for ids in (hashes, [[-(2**40)], [7]]):
        items, _ = events(pl.DataFrame({"items": ids, **ages}), tmp_path, unbounded=("product",))
        assert items.tolist() == [*ids[0], *ids[1]]
    small, _ = events(pl.DataFrame({"items": [[3], [5]], **ages}), tmp_path)
    assert small.dtype == np.int32
    for ids, unbounded, expected in (
        (large, (), "unbounded_feature_names"),
        ([[1], [-7]], (), "unbounded_feature_names"),
        ([[1], [-(2**63)]], ("product",), str(-(2**63))),
        ([[1], [2]], ("stars",), "unbounded_feature_names = ['stars']"),
    ):
        with pytest.raises(ValueError) as refused:
            events(pl.DataFrame({"items": ids, **ages}), tmp_path, unbounded)
        assert expected in str(refused.value)
