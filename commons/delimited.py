"""Reads columns of CSV files with pyarrow, and names the first row with a value that is not as expected."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
from pyarrow import csv

_BLOCK_BYTES = 1 << 21


@dataclass(frozen=True)
class Column:
    """A column to read.

    Attributes:
        name: name in the header, or any name in a file without one.
        value: expression of the value, where `pl.col(name)` is what the file has; null if it is unexpected.
        expected: description of the values that the column may have.
        dtype: type that the file's text is converted to.
    """

    name: str
    value: pl.Expr
    expected: str
    dtype: pa.DataType


def integer(name: str, least: int, most: int = 2**63 - 1) -> Column:
    """Returns a column of integers, Int64, from `least` to `most`, inclusive."""
    in_range = pl.when(pl.col(name).is_between(least, most)).then(name)
    return Column(name, in_range, f"an integer from {least} to {most}", pa.int64())


def read_batches(
    path: Path, columns: Sequence[Column], separator: str = ",", names: Sequence[str] | None = None
) -> Iterator[pl.DataFrame]:
    """Reads columns of a file of any size, a few megabytes at a time.

    Args:
        path: text in UTF-8. Its suffix says how it is compressed, as in ".gz".
        columns: columns to yield. The file may have others.
        separator: character between fields, or "::".
        names: names of all columns of a file without a header. None means that the first line names them.

    Raises:
        ValueError: the file cannot be read, lacks a column, or has a malformed row. Names the file and,
            where one row is at fault, its number, counted from 1.
    """
    row = 2 if names is None else 1
    if names is not None and separator == "::":  # ":", with an empty column between each two
        separator, names = ":", [part for name in names for part in (name, f"after {name}")][:-1]
    wanted = {column.name: column.dtype for column in columns}
    reading = csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES, column_names=names)
    converting = csv.ConvertOptions(include_columns=list(wanted), column_types=wanted)
    with _opened(path, reading, csv.ParseOptions(delimiter=separator), converting) as reader:
        for batch in reader:
            found = pl.DataFrame(batch)
            yield _values(path, row, found, columns)
            row += len(found)


@contextmanager
def _opened(path: Path, *options: Any) -> Iterator[csv.CSVStreamingReader]:
    """Yields a reader, whose errors become a ValueError of one line that names the file."""
    try:
        with pa.input_stream(path) as stream, csv.open_csv(stream, *options) as reader:
            yield reader
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _values(path: Path, first_row: int, found: pl.DataFrame, columns: Sequence[Column]) -> pl.DataFrame:
    values = found.select(column.value.alias(column.name) for column in columns)
    for row in values.select(pl.any_horizontal(pl.all().is_null()).arg_true()).to_series()[:1]:
        column = next(column for column in columns if values[column.name][row] is None)
        text = reprlib.repr(found[column.name][row])
        raise ValueError(
            f"{path}, row {first_row + row}: {column.name} is {text}, expected {column.expected}"
        )
    return values


def read_table(
    path: Path, columns: Sequence[Column], separator: str = ",", names: Sequence[str] | None = None
) -> pl.DataFrame:
    """Reads a whole table at once, as `read_batches` does batch by batch.

    Raises:
        ValueError: `read_batches` raises it, or the file has no rows.
    """
    batches = list(read_batches(path, columns, separator, names))
    if not batches:
        raise ValueError(f"{path} has no rows: expected at least one")
    return pl.concat(batches, rechunk=True)


def header_names(path: Path) -> list[str]:
    """Returns the names of the columns in a file's header.

    Raises:
        ValueError: the file cannot be read.
    """
    with _opened(path) as reader:
        return reader.schema.names
