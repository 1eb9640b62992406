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
        value: expression of the value, where `pl.col(name)` is its text; null if it is malformed.
        expected: description of the form that the text must have.
    """

    name: str
    value: pl.Expr
    expected: str


def integer(name: str, least: int, most: int = 2**63 - 1) -> Column:
    """Returns a column of integers, Int64, from `least` to `most`, inclusive."""
    value = pl.col(name).cast(pl.Int64, strict=False)
    in_range = pl.when(value.is_between(least, most)).then(value)
    return Column(name, in_range, f"an integer from {least} to {most}")


def read_batches(
    path: Path, columns: Sequence[Column], separator: str = ",", names: Sequence[str] | None = None
) -> Iterator[pl.DataFrame]:
    """Yields some columns of a file of any size, a few megabytes at a time.

    Args:
        path: text in UTF-8. Its suffix says how it is compressed, as in ".gz".
        columns: columns to yield, in order.
        separator: character between fields, or "::".
        names: names of all columns of a file without a header. None means that the first line names them.

    Raises:
        ValueError: the file cannot be read, lacks a column, or has a malformed row. Names the file and row.
    """
    row = 2 if names is None else 1
    if names is not None and separator == "::":  # ":", with an empty column between each two
        separator, names = ":", [part for name in names for part in (name, f"after {name}")][:-1]
    types = {column.name: pa.string() for column in columns}
    reading = csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES, column_names=names)
    converting = csv.ConvertOptions(include_columns=list(types), column_types=types)
    with _opened(path, reading, csv.ParseOptions(delimiter=separator), converting) as reader:
        for found in map(pl.DataFrame, reader):
            values = found.select(column.value.alias(column.name) for column in columns)
            for place in values.select(pl.any_horizontal(pl.all().is_null()).arg_true()).to_series()[:1]:
                column = next(column for column in columns if values[column.name][place] is None)
                text = f"{column.name} is {reprlib.repr(found[column.name][place])}"
                raise ValueError(f"{path}, row {row + place}: {text}, expected {column.expected}")
            yield values
            row += len(found)


@contextmanager
def _opened(path: Path, *options: Any) -> Iterator[csv.CSVStreamingReader]:
    try:
        with pa.input_stream(path) as stream, csv.open_csv(stream, *options) as reader:
            yield reader
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def read_table(
    path: Path, columns: Sequence[Column], separator: str = ",", names: Sequence[str] | None = None
) -> pl.DataFrame:
    """Returns what `read_batches` yields, at once. A ValueError is also raised if there are no rows."""
    batches = list(read_batches(path, columns, separator, names))
    if not batches:
        raise ValueError(f"{path} has no rows: expected at least one")
    return pl.concat(batches, rechunk=True)


def header_names(path: Path) -> list[str]:
    """Returns the names of a file's columns. Raises a ValueError if the file cannot be read."""
    with _opened(path) as reader:
        return reader.schema.names
