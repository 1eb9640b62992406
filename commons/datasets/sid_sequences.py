"""Samples of semantic IDs from a Parquet file of item sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from .id_columns import errors_name_file, read_ids, row_at
from .item_sids import ItemSIDs
from .sid_batch import SIDDatasetSpec, SIDSample, SIDSource

SEQUENCE_COLUMN = "sequence_data"


class SIDSequenceSource(SIDSource):
    """One sample per row of a Parquet file, with the row's newest `spec.max_items` items.

    The column "sequence_data" has lists of integer item ids, oldest first. The last item is the target. Each
    contextual feature of the spec has a column of integer ids. Other columns are not read. Every process
    reads the whole file and keeps four bytes per item.

    Args:
        path: path of the file.
        sids: codes of the items.
        spec: codes and lengths of the samples.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is malformed, an item has no codes, a contextual id is outside its vocabulary, or
            `sids` does not fit the spec's codebooks. Errors about the file name it, and the row from 0.
    """

    def __init__(self, path: Path, sids: ItemSIDs, spec: SIDDatasetSpec) -> None:
        sids.check_codebooks(spec.codebook_sizes)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        sizes = spec.contextual_vocab_sizes
        with errors_name_file(path):
            present = pl.scan_parquet(path, glob=False).collect_schema().names()
            for name in (SEQUENCE_COLUMN, *sizes):
                if name not in present:
                    raise ValueError(f"it has no column {name!r}; it has {present}")
            table = pl.read_parquet(path, columns=[SEQUENCE_COLUMN, *sizes], glob=False)
            items, offsets = read_ids(table[SEQUENCE_COLUMN], SEQUENCE_COLUMN, in_lists=True)
            self._contextual = {
                name: read_ids(table[name], name, least=0, most=size - 1)[0].astype(np.int64)
                for name, size in sizes.items()
            }
        self._sids = sids
        self.spec = spec
        self._offsets = offsets  # [samples + 1]
        self._rows = _rows_of(path, sids, items, offsets)  # positions in `sids` of all samples' items

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


def _rows_of(path: Path, sids: ItemSIDs, items: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Returns `sids.rows_of(items)` as int32, to halve the memory. Errors name the file and the row."""
    try:
        return sids.rows_of(items).astype(np.int32)
    except ValueError as error:
        row = row_at(np.flatnonzero(~np.isin(items, sids.items))[0], offsets)
        raise ValueError(f"{path}, row {row}: {error}") from error
