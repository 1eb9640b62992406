"""Columns of ids in Parquet files with one row per user or sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl


@contextmanager
def errors_name_file(path: Path, advice: str = "") -> Iterator[None]:
    """Re-raises errors about a file's contents as a ValueError that names the file and adds `advice`."""
    try:
        yield
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        reason = " ".join(str(error).split())  # polars' errors have several lines
        raise ValueError(f"{path} is malformed: {reason}{advice}") from error


def read_ids(
    column: pl.Series,
    feature: str,
    in_lists: bool = False,
    least: int = -(2**63),
    most: int = 2**63 - 1,
    hint: str = "",
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the concatenated ids of all rows, and the offsets of the rows.

    Args:
        column: column of integers or, with `in_lists`, of lists of integers, none of which is empty.
        feature: name of the ids in errors.
        in_lists: whether each row is a list.
        least, most: smallest and largest valid id.
        hint: text at the end of an error about an id that is negative or at least 2^31.

    Returns:
        The ids, as int32 if all of them fit, else as int64, and the offsets, int64 `[rows + 1]`.

    Raises:
        ValueError: the column has another type, a row is null or empty, or an id is null or out of range. The
            message names the column or the feature, and the row if one is at fault.
    """
    dtype = column.dtype
    inner = dtype.inner if in_lists and isinstance(dtype, pl.List) else dtype
    if in_lists != isinstance(dtype, pl.List) or not inner.is_integer():
        expected = "lists of integers" if in_lists else "integers"
        raise ValueError(f"column {column.name!r} is {dtype}: expected {expected}")
    nulls = column.is_null().arg_true()
    if len(nulls):
        raise ValueError(f"row {nulls[0]}: column {column.name!r} is null")
    lengths = column.list.len().cast(pl.Int64).to_numpy() if in_lists else np.ones(len(column), np.int64)
    if not lengths.all():
        row = np.flatnonzero(lengths == 0)[0]
        raise ValueError(f"row {row}: column {column.name!r} is empty: expected at least one id")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = column.explode() if in_lists else column
    ids = values if values.dtype in (pl.Int32, pl.Int64) else values.cast(pl.Int64, strict=False)
    extremes: tuple[Any, Any] = (ids.min(), ids.max()) if len(ids) else (least, least)
    smallest, largest = extremes
    if ids.null_count() or smallest < least or largest > most:
        place = (~ids.cast(pl.Int64).is_between(least, most)).fill_null(True).arg_true()[0]
        value, row = values[place], row_at(place, offsets)
        found = "null" if value is None else value
        wanted = "an integer" if value is None and most - least > 2**63 else f"{least} to {most}"
        advice = hint if value is not None and not 0 <= value < 2**31 else ""
        raise ValueError(f"row {row}: feature {feature!r} has id {found}: expected {wanted}{advice}")
    fits = smallest >= -(2**31) and largest < 2**31
    return ids.cast(pl.Int32 if fits else pl.Int64).to_numpy(), offsets


def row_at(position: int, offsets: np.ndarray) -> int:
    """Returns the row that contains a position in the concatenated ids."""
    return int(np.searchsorted(offsets, position, side="right")) - 1
