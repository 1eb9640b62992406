"""Samples of semantic IDs from a Parquet file of item sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from .item_sids import ItemSIDs
from .sid_batch import SIDDatasetSpec, SIDSample, SIDSource

SEQUENCE_COLUMN = "sequence_data"


class SIDSequenceSource(SIDSource):
    """One sample per row of a Parquet file: its newest `spec.max_items` items.

    The column "sequence_data" has lists of integer item ids, oldest first; the last one is the target. Each
    contextual feature of the spec has a column of integer ids. Other columns are not read. Every process
    reads the whole file and keeps four bytes per item.

    Args:
        path: the file.
        sids: the items' codes.
        spec: codes and lengths of the samples.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is malformed, an item has no codes, a contextual id is outside its vocabulary, or
            `sids` does not fit the spec's codebooks. Names the file and, if one is at fault, the row from 0.
    """

    def __init__(self, path: Path, sids: ItemSIDs, spec: SIDDatasetSpec) -> None:
        sids.check_codebooks(spec.codebook_sizes)
        table = _read_table(path, list(spec.contextual_vocab_sizes))
        items, offsets = _flat_items(path, table[SEQUENCE_COLUMN])
        self._sids = sids
        self.spec = spec
        self._offsets = offsets  # [samples + 1]
        self._rows = _rows_of(path, sids, items, offsets)  # places in sids, of all samples
        self._contextual = {
            name: _contextual_ids(path, table[name], size)
            for name, size in spec.contextual_vocab_sizes.items()
        }

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> SIDSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index}: expected 0 to {len(self) - 1}")
        start, end = (int(offset) for offset in self._offsets[index : index + 2])
        rows = self._rows[max(start, end - self.spec.max_items) : end]
        return SIDSample(
            codes=self._sids.codes[rows],
            target_item=int(self._sids.items[rows[-1]]),
            contextual={name: ids[index : index + 1] for name, ids in self._contextual.items()},
        )


def _read_table(path: Path, contextual: list[str]) -> pl.DataFrame:
    """Reads the sequences and the contextual features."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        file = pl.scan_parquet(path, glob=False)
        _check_columns(path, file.collect_schema(), contextual)
        return file.select(SEQUENCE_COLUMN, *contextual).collect()
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path} is malformed: {' '.join(str(error).split())}") from error


def _check_columns(path: Path, schema: pl.Schema, contextual: list[str]) -> None:
    for name in (SEQUENCE_COLUMN, *contextual):
        if name not in schema:
            raise ValueError(f"{path} has no column {name!r}; it has {schema.names()}")
    sequence = schema[SEQUENCE_COLUMN]
    if not isinstance(sequence, pl.List) or not sequence.inner.is_integer():
        raise ValueError(f"{path}: column {SEQUENCE_COLUMN!r} is {sequence}: expected a list of integers")
    for name in contextual:
        if not schema[name].is_integer():
            raise ValueError(f"{path}: column {name!r} is {schema[name]}: expected integers")


def _flat_items(path: Path, sequences: pl.Series) -> tuple[np.ndarray, np.ndarray]:
    """Returns the item ids of all rows, concatenated, and the rows' `[rows + 1]` int64 offsets."""
    _check_no_null(path, sequences)
    lengths = sequences.list.len().cast(pl.Int64).to_numpy()
    if not lengths.all():
        row = np.flatnonzero(lengths == 0)[0]
        raise ValueError(f"{path}, row {row}: {SEQUENCE_COLUMN} is empty: expected the target at least")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = sequences.explode()
    if items.null_count():
        row = _row_at(items.is_null().arg_true()[0], offsets)
        raise ValueError(f"{path}, row {row}: {SEQUENCE_COLUMN} has a null item: expected integers")
    return _int64(path, items, offsets), offsets


def _int64(path: Path, ids: pl.Series, offsets: np.ndarray) -> np.ndarray:
    """Returns ids, none of which is null, in int64; `offsets` are where each row's begin."""
    numbers = ids.cast(pl.Int64, strict=False)
    if numbers.null_count():
        position = int(numbers.is_null().arg_true()[0])
        row = _row_at(position, offsets)
        raise ValueError(
            f"{path}, row {row}: {ids.name} has id {ids[position]}: expected one that int64 holds"
        )
    return numbers.to_numpy()


def _rows_of(path: Path, sids: ItemSIDs, items: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Calls `sids.rows_of`, in int32 to halve the memory; errors name the row of the file."""
    try:
        return sids.rows_of(items).astype(np.int32)
    except ValueError as error:
        row = _row_at(np.flatnonzero(~np.isin(items, sids.items))[0], offsets)
        raise ValueError(f"{path}, row {row}: {error}") from error


def _contextual_ids(path: Path, column: pl.Series, vocab_size: int) -> np.ndarray:
    _check_no_null(path, column)
    ids = _int64(path, column, np.arange(len(column) + 1))
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        raise ValueError(
            f"{path}, row {outside[0]}: feature {column.name!r} has id {ids[outside[0]]}: "
            f"expected 0 to {vocab_size - 1}"
        )
    return ids


def _check_no_null(path: Path, column: pl.Series) -> None:
    if column.null_count():
        raise ValueError(f"{path}, row {column.is_null().arg_true()[0]}: {column.name} is null")


def _row_at(position: int, offsets: np.ndarray) -> int:
    """Returns the row that contains a position of the concatenated items."""
    return int(np.searchsorted(offsets, position, side="right")) - 1
