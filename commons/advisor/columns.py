"""Reads lengths, ids, and groups from columns of `.csv` and `.parquet` files.

The file must exist. Functions raise InputError if it is unreadable, lacks the column, or has invalid values.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from ..delimited import Column, header_names, read_table
from . import InputError
from .samples import IdColumn, example_of, format_of

# Rows of lists to read at a time. A file's row groups may be larger than memory.
_ROWS_AT_A_TIME = 1 << 10


def read_ids(path: Path, column: str) -> IdColumn:
    """Counts each sample's ids in a `.parquet` file's column of lists, and returns a reader of the ids."""
    if format_of(path) != ".parquet":
        raise InputError(f"--ids {column} has no effect on {path}; expected it with .parquet")
    table, name = _parquet(path, "--ids", column)
    dtype = table.collect_schema()[name]
    if not isinstance(dtype, pl.List | pl.Array) or not dtype.inner.is_integer():
        raise InputError(f"{path}: column {column} holds {dtype}; expected lists of integers")
    lengths, whole = [], []
    for lists in _lists(path, name):
        lengths.append(lengths_in(path, lists))
        whole.append(lists.list.drop_nulls().list.len().to_numpy())
    holes = np.flatnonzero(np.concatenate(lengths) != np.concatenate(whole))
    if len(holes):
        raise InputError(f"{path}, row {holes[0]}: {column} has a null in its list; expected integers")
    return IdColumn(np.concatenate(lengths), partial(_ids_of, path, name))


def _ids_of(path: Path, column: str, samples: np.ndarray) -> np.ndarray:
    """Returns the ids of `samples`, ascending int64 `[n]`, concatenated sample by sample."""
    parts, start = [], 0
    for lists in _lists(path, column):
        first, end = np.searchsorted(samples, [start, start + len(lists)])
        parts.append(lists.gather(samples[first:end] - start))
        start += len(lists)
        if end == len(samples):
            break
    ids = pl.concat(parts)
    return ids.filter(ids.list.len() > 0).explode().to_numpy()  # an empty list would become a null


def read_groups(path: Path, column: str) -> np.ndarray:
    """Reads each sample's group, int64 `[samples]`, from a column of integers. Negative means no group."""
    if format_of(path) not in (".csv", ".parquet"):
        raise InputError(f"--groups {column} has no effect on {path}; expected it with .csv or .parquet")
    values = read_column(path, "--groups", column)
    if isinstance(values.dtype, pl.List | pl.Array):
        raise InputError(f"{path}: column {column} holds {values.dtype}; expected integers")
    values = _integers(path, values)
    numbers = values.rank("dense").cast(pl.Int64).to_numpy()  # hashes may need more than int64
    return np.where((values < 0).to_numpy(), -1, numbers)


def read_column_lengths(path: Path, option: str, column: str | None) -> np.ndarray:
    """Reads lengths, int64 `[samples]`, from a column of integers or lists.

    Lists are counted as they are read, and are not kept.
    """
    if format_of(path) == ".parquet":
        table, name = _parquet(path, option, column)
        if isinstance(table.collect_schema()[name], pl.List | pl.Array):
            return np.concatenate([lengths_in(path, lists) for lists in _lists(path, name)])
    return lengths_in(path, read_column(path, option, column))


def read_column(path: Path, option: str, column: str | None) -> pl.Series:
    """Reads a column. A column of a `.csv` file is read as text.

    If `column` is None, the file must have a single column. Messages name `option`, which set `column`.
    """
    if format_of(path) == ".parquet":
        table, name = _parquet(path, option, column)
        try:
            return table.select(name).collect(engine="streaming").to_series()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise _unreadable(path, error) from error
    try:
        names = header_names(path)
        if names[0].strip().lstrip("+-").isdecimal():
            found = reprlib.repr(",".join(names))
            raise InputError(f"{path} begins with {found}; expected a header, the names of its columns")
        name = _name_among(path, names, option, column)
        return read_table(path, [Column(name, pl.col(name), "text")]).to_series()
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error


def _parquet(path: Path, option: str, column: str | None) -> tuple[pl.LazyFrame, str]:
    """Returns a Parquet file, to be read lazily, and the name of the column."""
    try:
        table = pl.scan_parquet(path, glob=False)
        names = table.collect_schema().names()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _unreadable(path, error) from error
    return table, _name_among(path, names, option, column)


def _name_among(path: Path, names: list[str], option: str, column: str | None) -> str:
    if column is None and len(names) != 1:
        raise InputError(f"{path} has the columns {', '.join(names)}; name the one with --column")
    if column is not None and column not in names:
        raise InputError(f"{option} {column}: {path} has no such column; it has {', '.join(names)}")
    return column or names[0]


def _lists(path: Path, column: str) -> Iterator[pl.Series]:
    """Yields a column of lists in small batches. pyarrow reads pages; polars would read whole row groups."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path, buffer_size=1 << 16, pre_buffer=False) as file:
            none = file.schema_arrow.empty_table()  # a file may have no rows
            batches = file.iter_batches(_ROWS_AT_A_TIME, columns=[column], use_threads=False)
            start = 0
            for rows in itertools.chain([none], batches):
                values = pl.Series(column, rows[column])
                _check_no_null(path, values, start)
                start += len(values)
                yield values.arr.to_list() if isinstance(values.dtype, pl.Array) else values
    except (pa.ArrowException, pl.exceptions.PolarsError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    with path.open("rb") as file:
        start = file.read(8)
    return InputError(f"{path} begins with {start!r} and cannot be read as Parquet: {error}")


def lengths_in(path: Path, values: pl.Series) -> np.ndarray:
    """Returns the lengths in a column of integers or lists. Nulls, fractions, and words are errors."""
    if isinstance(values.dtype, pl.List):  # from `_lists`, which rejects nulls
        return values.list.len().cast(pl.Int64).to_numpy()
    numbers = _integers(path, values)
    if numbers.dtype in (pl.Int128, pl.UInt64):
        # The clipped values fit int64, and are still outside the range of valid lengths.
        numbers = numbers.cast(pl.Int128).clip(-(2**62), 2**62)
    return numbers.cast(pl.Int64).to_numpy()


def _integers(path: Path, values: pl.Series) -> pl.Series:
    """Returns a column's integers, parsed if the column is text."""
    _check_no_null(path, values)
    if values.dtype.is_integer():
        return values
    if values.dtype == pl.String:
        numbers = values.cast(pl.Int128, strict=False)
        if not numbers.null_count():
            return numbers
        row = numbers.is_null().arg_true()[0]
        raise InputError(
            f"{path}, row {row}: {values.name} is {reprlib.repr(values[row])}; expected an integer"
        )
    rows = pl.Series(dtype=pl.UInt32)
    if values.dtype.is_float():
        rows = (values.is_nan() | (values != values.floor())).arg_true()
    example = example_of(values, rows)
    raise InputError(f"{path}: column {values.name} holds {values.dtype}{example}; expected integers")


def _check_no_null(path: Path, values: pl.Series, first_row: int = 0) -> None:
    if values.null_count():
        row = first_row + values.is_null().arg_true()[0]
        raise InputError(f"{path}, row {row}: {values.name} is null; expected an integer")
