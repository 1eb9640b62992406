"""The batch format that ranks agree on at the first batch, and batches made by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..sequence_batch import containers
from ..sequence_batch.batch_view import BatchView
from ..sequence_batch.packed_rows import PackedRows
from .count_rows import RowFormat


class BatchFormat:
    """The batch format that the ranks agreed on at the first batch.

    Args:
        rows: what is known of every row.
        padding: a batch of one row, the same on all ranks.
        pinned: whether this rank's batches are in pinned memory.
        agreed: what features agreed on, by their names.

    Attributes:
        rows, agreed: as given.
        pads: whether batches know their padding rows, and so may be padded.
    """

    def __init__(
        self,
        rows: RowFormat,
        padding: BatchView,
        pinned: bool,
        agreed: Mapping[str, Any],
    ) -> None:
        self.rows, self.agreed = rows, agreed
        self.pads = padding.pads
        self._padding, self._pinned = padding, pinned

    def padding_batch(self) -> Any:
        """Returns a batch of one row, for a rank without samples, with the same row on all ranks: padding, or
        a copy of a real row where batches do not know their padding."""
        row = self._padding.copy()  # a model may work in place on what it is given
        return containers.pin(row) if self._pinned else row

    def make_batch(self, like: BatchView, rows: PackedRows, num_rows: int, row_counts: np.ndarray) -> Any:
        """Makes a batch of packed rows, padded to `num_rows`; a copy of a real row if there are none.

        Args:
            like: gives the type, and what samples share.
            rows: the samples.
            num_rows: rows of the batch.
            row_counts: int64 `[samples, names]`.
        """
        if rows.num_rows or like.pads:
            made = like.unpack(rows, num_rows)
            return self.with_row_counts(like.view(made), row_counts)
        copied = containers.move_to(self.padding_batch(), like.device, non_blocking=True)
        return like.with_rows(like.view(copied).fields, 1, 0)

    def with_row_counts(self, batch: BatchView, row_counts: np.ndarray) -> Any:
        """Returns the batch with the row counts of its real rows, int64 `[samples, names]`."""
        names = self.rows.count_names
        if not names:
            return batch.batch
        padded = np.zeros((len(names), batch.num_rows), dtype=np.int64)
        padded[:, : len(row_counts)] = row_counts.T
        return batch.with_row_counts(dict(zip(names, padded, strict=True)))
