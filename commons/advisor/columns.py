"""Columns of `.csv` and `.parquet` files: lengths, ids and groups."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import polars as pl

from . import InputError
from .samples import SampleIds, example_of

_INTEGER = r"^\s*[+-]?\d+\s*$"


def read_ids(path: Path, column: str) -> SampleIds:
    """Reads the ids of all samples from a `.parquet` file's column of lists.

    Raises:
        InputError: the file or the column does not exist, or holds something else.
    """
    if path.suffix.lower() != ".parquet":
        raise InputError(f"--ids {column} has no effect on {path}; expected it with .parquet")
    lists = read_column(path, "--ids", column)
    lengths = lengths_in(path, lists)
    if isinstance(lists.dtype, pl.Array):
        lists = lists.arr.to_list()
    if not isinstance(lists.dtype, pl.List) or not lists.dtype.inner.is_integer():
        raise InputError(f"{path}: column {column} holds {lists.dtype}; expected lists of integers")
    ids = lists.filter(lists.list.len() > 0).explode()  # an empty list would become a null
    if ids.null_count():
        raise InputError(f"{path}: column {column} has a null in a list; expected integers")
    return SampleIds(ids.to_numpy(), np.concatenate([[0], np.cumsum(lengths)]))


def read_groups(path: Path, column: str) -> np.ndarray:
    """Reads the group of each sample, int64 `[samples]`, from a column of integers; below 0 is none.

    Raises:
        InputError: the file or the column does not exist, or holds something else.
    """
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise InputError(f"--groups {column} has no effect on {path}; expected it with .csv or .parquet")
    values = read_column(path, "--groups", column)
    if isinstance(values.dtype, pl.List | pl.Array):
        raise InputError(f"{path}: column {column} holds {values.dtype}; expected integers")
    lengths_in(path, values)  # checks them
    numbers = values.rank("dense").cast(pl.Int64).to_numpy()  # hashes may need more than int64
    return np.where((values < 0).to_numpy(), -1, numbers)


def read_column(path: Path, option: str, column: str | None) -> pl.Series:
    """Reads a column; `option` is the one that names it, for messages. None means the only column.

    Raises:
        InputError: the file or the column does not exist, or cannot be read.
    """
    csv = path.suffix.lower() == ".csv"
    try:
        # The whole file decides the type of a column, so that a word in the last row is named, too.
        table = (
            pl.scan_csv(path, infer_schema_length=None, glob=False)
            if csv
            else pl.scan_parquet(path, glob=False)
        )
        names = table.collect_schema().names()
        if csv and re.match(_INTEGER, names[0]):
            raise InputError(f"{path} begins with {names[0]}; expected a header, the names of its columns")
        if column is None and len(names) != 1:
            raise InputError(f"{path} has the columns {', '.join(names)}; name the one with --column")
        if column is not None and column not in names:
            raise InputError(f"{option} {column}: {path} has no such column; it has {', '.join(names)}")
        return table.select(column or names[0]).collect().to_series()
    except pl.exceptions.NoDataError as error:
        raise InputError(f"{path} is empty; expected a header, and one length per sample") from error
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{path} cannot be read as {path.suffix}: {error}") from error


def lengths_in(path: Path, values: pl.Series) -> np.ndarray:
    """Returns the lengths that a column holds, as integers or as lists; refuses null, fractions and words."""
    if values.null_count():
        row = values.is_null().arg_true()[0]
        raise InputError(f"{path}, row {row}: {values.name} is null; expected an integer")
    if isinstance(values.dtype, pl.Array):
        values = values.arr.to_list()
    if isinstance(values.dtype, pl.List):
        return values.list.len().cast(pl.Int64).to_numpy()
    if not values.dtype.is_integer():
        rows = pl.Series(dtype=pl.UInt32)
        if values.dtype == pl.String:
            rows = (~values.str.contains(_INTEGER)).arg_true()
        elif values.dtype.is_float():
            rows = (values.is_nan() | (values != values.floor())).arg_true()
        example = example_of(values, rows)
        raise InputError(f"{path}: column {values.name} holds {values.dtype}{example}; expected integers")
    if values.dtype in (pl.Int128, pl.UInt64):
        # Clipped to what int64 holds, which is still longer than any valid length.
        values = values.cast(pl.Int128).clip(-(2**62), 2**62).cast(pl.Int64)
    return values.to_numpy()
