"""Sequence lengths, as they are read from files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError

import numpy as np
import polars as pl

from commons.advisor.input_error import InputError

FORMATS = (".csv", ".npy", ".parquet")
_INTEGER = r"^\s*[+-]?\d+\s*$"


@dataclass(frozen=True)
class TokenRule:
    """Tokens of a sample of so many items: `per_item` · items + `extra`."""

    per_item: int
    extra: int

    def of(self, items: np.ndarray) -> np.ndarray:
        """int64 `[samples]` from int64 `[samples]`."""
        return self.per_item * items + self.extra

    def __str__(self) -> str:
        scaled = "length" if self.per_item == 1 else f"{self.per_item} × length"
        return scaled if self.extra == 0 else f"{scaled} + {self.extra}"


@dataclass(frozen=True)
class SampleLengths:
    """The samples of one epoch.

    Attributes:
        items: int64 `[samples]`, the length of each.
        tokens: int64 `[samples]`, what a model computes of each.
        token_rule: how tokens follow from lengths, in words.
        source: where the lengths are from, in words.
    """

    items: np.ndarray
    tokens: np.ndarray
    token_rule: str
    source: str


def read_lengths(path: Path, column: str | None) -> np.ndarray:
    """int64 `[samples]` of a file.

    Args:
        path: `.npy`, a one-dimensional array of integers; or `.csv` or `.parquet`.
        column: of the last two: integers, or, in Parquet, lists, whose lengths count. None for the only one.

    Raises:
        InputError: there is no such file or column, or the values are no lengths.
    """
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path} is in no format that is read here; expected {', '.join(FORMATS)} or .gin")
    if not path.is_file():
        state = "is no file" if path.exists() else "does not exist"
        raise InputError(f"{path} {state}; expected a file of sequence lengths")
    if path.suffix.lower() == ".npy":
        if column is not None:
            raise InputError(f"--column {column} has no effect on {path}; expected it with .csv or .parquet")
        lengths = _read_array(path)
    else:
        lengths = _read_column(path, column)
    if len(lengths) == 0:
        raise InputError(f"{path} is empty; expected one length per sample")
    if lengths.min() < 0:
        row = int(np.flatnonzero(lengths < 0)[0])
        raise InputError(f"{path}, row {row}: length {lengths[row]}; expected at least 0")
    if lengths.max() >= 2**31:
        row = int(np.argmax(lengths))
        raise InputError(f"{path}, row {row}: length {lengths[row]}; expected less than 2^31")
    return lengths.astype(np.int64)


def _read_array(path: Path) -> np.ndarray:
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError, SyntaxError, TokenError) as error:
        raise InputError(f"{path} cannot be read as an array: {error}") from error
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        raise InputError(f"{path} has shape {np.shape(values)}; expected one dimension, [samples]")
    if values.dtype.kind not in "iu":
        raise InputError(f"{path} holds {values.dtype}{_first_fraction(values)}; expected integers")
    return values


def _first_fraction(values: np.ndarray) -> str:
    """Where the first value is that no cast to integers would keep."""
    if not np.issubdtype(values.dtype, np.floating):
        return ""
    fractions = np.flatnonzero(values != np.floor(values))  # NaN is equal to nothing
    return f" (row {fractions[0]} is {values[fractions[0]]})" if len(fractions) else ""


def _read_column(path: Path, column: str | None) -> np.ndarray:
    try:
        # The whole file decides the type of a column: a word in its last row must be named, too.
        csv = path.suffix.lower() == ".csv"
        table = (
            pl.scan_csv(path, infer_schema_length=None, glob=False)
            if csv
            else pl.scan_parquet(path, glob=False)
        )
        names = table.collect_schema().names()
        if csv and re.match(_INTEGER, names[0]):
            raise InputError(f"{path} begins with {names[0]}; expected a header, the names of its columns")
        name = _column_name(path, names, column)
        values = table.select(name).collect()[name]
    except (pl.exceptions.PolarsError, OSError) as error:
        if isinstance(error, pl.exceptions.NoDataError):
            raise InputError(f"{path} is empty; expected a header, and one length per sample") from error
        raise InputError(f"{path} cannot be read as {path.suffix}: {error}") from error
    return _lengths_of(path, values)


def _column_name(path: Path, names: list[str], column: str | None) -> str:
    if column is None:
        if len(names) != 1:
            raise InputError(f"{path} has the columns {', '.join(names)}; name the one with --column")
        return names[0]
    if column not in names:
        raise InputError(f"--column {column}: {path} has no such column; it has {', '.join(names)}")
    return column


def _lengths_of(path: Path, values: pl.Series) -> np.ndarray:
    """What a column says about lengths; null, fractions and words are none."""
    if values.null_count():
        row = values.is_null().arg_true()[0]
        raise InputError(f"{path}, row {row}: {values.name} is null; expected an integer")
    if isinstance(values.dtype, pl.Array):
        values = values.arr.to_list()
    if isinstance(values.dtype, pl.List):
        return values.list.len().cast(pl.Int64).to_numpy()
    if not values.dtype.is_integer():
        raise InputError(
            f"{path}: column {values.name} holds {values.dtype}{_first_no_integer(values)}; expected integers"
        )
    if values.dtype == pl.Int128 or values.dtype == pl.UInt64:
        # What does not fit is longer than any length may be.
        values = values.clip(-(2**62), 2**62).cast(pl.Int64)
    return values.to_numpy()


def _first_no_integer(values: pl.Series) -> str:
    if values.dtype == pl.String:
        rows = (~values.str.contains(_INTEGER)).arg_true()
    elif values.dtype.is_float():
        rows = (values.is_nan() | (values != values.floor())).arg_true()
    else:
        return ""
    return f" (row {rows[0]} is {values[rows[0]]})" if len(rows) else ""
