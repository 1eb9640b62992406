from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from commons.advisor.lengths import TokenRule, read_lengths


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64])
def test_an_array_of_integers(dtype: type, tmp_path: Path):
    np.save(tmp_path / "lengths.npy", np.array([3, 0, 7], dtype=dtype))
    lengths = read_lengths(tmp_path / "lengths.npy", None)
    assert lengths.dtype == np.int64
    assert lengths.tolist() == [3, 0, 7]


def test_the_only_column_needs_no_name(tmp_path: Path):
    (tmp_path / "lengths.csv").write_text("n\n5\n6\n")
    assert read_lengths(tmp_path / "lengths.csv", None).tolist() == [5, 6]


def test_lists_count_by_their_length(tmp_path: Path):
    path = tmp_path / "histories.parquet"
    pl.DataFrame({"user": [1, 2, 3], "items": [[4, 5], [], [6]]}).write_parquet(path)
    assert read_lengths(path, "items").tolist() == [2, 0, 1]
    assert read_lengths(path, "user").tolist() == [1, 2, 3]


def test_tokens_of_lengths():
    rule = TokenRule(2, 1)
    assert rule.of(np.array([0, 5])).tolist() == [1, 11]
    assert str(rule) == "2 × length + 1"
    assert str(TokenRule(1, 0)) == "length"
