"""What ranks agree on at the first batch, and batches made by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from ..sequence_batch import BaseBatch, containers
from ..sequence_batch.packed_rows import PackedRows
from ..sequence_batch.sample_rows import SampleRows, knows_padding
from .count_rows import RowFormat

Batch = TypeVar("Batch")


class BatchFormat:
    """The batch format that the ranks agreed on at the first batch.

    Args:
        rows: what is known of every row.
        padding_batch: a batch of one row, the same on all ranks.
        sample_rows: reads the rows of batches.
        pinned: whether this rank's batches are in pinned memory.
        agreed: what features agreed on, by their names.

    Attributes:
        rows, agreed: as given.
        pads: whether batches know their padding rows, and so may be padded.
    """

    def __init__(
        self,
        rows: RowFormat,
        padding_batch: Any,
        sample_rows: SampleRows,
        pinned: bool,
        agreed: Mapping[str, Any],
    ) -> None:
        self.rows, self.agreed = rows, agreed
        self.pads = knows_padding(padding_batch)
        self._padding_batch, self._sample_rows, self._pinned = padding_batch, sample_rows, pinned

    def padding_batch(self) -> Any:
        """Returns a batch of one row, for a rank without samples, with the same row on all ranks: padding, or
        a copy of a real row where batches do not know their padding."""
        row = self._sample_rows.copied(self._padding_batch)  # a model may work in place on what it is given
        return containers.pinned(row) if self._pinned else row

    def make_batch(self, like: Batch, rows: PackedRows, num_rows: int, row_counts: np.ndarray) -> Batch:
        """Makes a batch of packed rows, padded to `num_rows`; a copy of a real row if there are none.

        Args:
            like: gives the type, and what samples share.
            rows: the samples.
            num_rows: rows of the batch.
            row_counts: int64 `[samples, names]`.
        """
        if rows.num_rows or knows_padding(like):
            made = self._sample_rows.unpacked(like, rows, num_rows)
        else:
            device = self._sample_rows.device_of(like)
            copied = containers.moved_to(self.padding_batch(), device, non_blocking=True)
            fields = self._sample_rows.per_sample_fields(copied)
            made = self._sample_rows.with_rows(like, fields, 1, 0)
        return self.with_row_counts(made, row_counts)

    def with_row_counts(self, batch: Batch, row_counts: np.ndarray) -> Batch:
        """Returns the batch with the row counts of its real rows, int64 `[samples, names]`."""
        names = self.rows.count_names
        if not names or not isinstance(batch, BaseBatch):
            return batch
        padded = np.zeros((len(names), batch.batch_size), dtype=np.int64)
        padded[:, : len(row_counts)] = row_counts.T
        return batch.with_row_counts(dict(zip(names, padded, strict=True)))
