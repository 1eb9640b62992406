"""Reads sequence lengths from files. polars is imported only for the formats that need it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from . import InputError

LONGEST = 2**31 - 1


def read_lengths(path: Path, column: str | None = None) -> np.ndarray:
    """Reads sequence lengths, int64 `[samples]`.

    Args:
        path: `.npy` file of a one-dimensional integer array, or a `.csv`, `.csv.gz`, or `.parquet` file.
        column: Column of a `.csv` or `.parquet` file, which holds integers or, in Parquet, lists to count.
            None means the only column.

    Raises:
        InputError: the file or the column does not exist, or its values are not lengths.
    """
    readers = {".npy": _read_array, ".csv": _read_csv, ".csv.gz": _read_csv, ".parquet": _read_parquet}
    endings = [ending for ending in readers if path.name.lower().endswith(ending)]
    if not endings:
        raise InputError(f"{path} has an unknown format; expected {', '.join(readers)}, or .gin")
    try:
        lengths = readers[endings[0]](path, column)
        if len(lengths) == 0 or not 0 <= lengths.min() <= lengths.max() <= LONGEST:
            wrong = f"{lengths.min()} to {lengths.max()}" if len(lengths) else "none"
            raise ValueError(f"lengths: {wrong}; expected one per sample, from 0 to {LONGEST}")
    except (EOFError, OSError, ValueError) as error:
        raise InputError(error if str(path) in str(error) else f"{path}: {error}") from error
    return lengths.astype(np.int64, copy=False)


def _read_array(path: Path, _: str | None) -> np.ndarray:
    values = np.load(path, allow_pickle=False)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"{values.dtype} of shape {values.shape}; expected integers in one dimension")
    return values


def _read_csv(path: Path, column: str | None) -> np.ndarray:
    from ..delimited import header_names, integer, read_table

    name = _name_among(header_names(path), column)
    return read_table(path, [integer(name, 0, LONGEST)]).to_series().to_numpy()


def _read_parquet(path: Path, column: str | None) -> np.ndarray:
    import polars as pl

    try:
        table = pl.scan_parquet(path, glob=False)
        schema = table.collect_schema()
        name = _name_among(schema.names(), column)
        is_list = isinstance(schema[name], pl.List)
        if not is_list and not schema[name].is_integer():  # a cast would round floats
            raise ValueError(f"column {name} holds {schema[name]}; expected integers or lists")
        length = pl.col(name).list.len() if is_list else pl.col(name)
        lengths = table.select(length.cast(pl.Int64)).collect(engine="streaming").to_series()
    except pl.exceptions.PolarsError as error:
        raise ValueError(str(error)) from error
    if lengths.null_count():
        raise ValueError(f"row {lengths.is_null().arg_true()[0]}: {name} is null; expected a length")
    return lengths.to_numpy()


def _name_among(names: Sequence[str], column: str | None) -> str:
    if column is None and len(names) == 1:
        return names[0]
    if column is None or column not in names:
        raise ValueError(f"--column {column}; expected one of {', '.join(names)}")
    return column
