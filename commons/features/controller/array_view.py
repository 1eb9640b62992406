"""The rows of a batch in one process, which may be those of numpy arrays, too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...sequence_batch import containers
from ...sequence_batch.base_batch import BaseBatch
from ...sequence_batch.batch_view import BatchView, view_batch
from ...sequence_batch.row_schema import FieldValue


def view_with_arrays(batch: Any, shared: Collection[str] = (), first: int = 0) -> BatchView:
    """Returns the view of a batch that may have numpy arrays of any dtype; a `BaseBatch` has none.

    `first` is the number of the first row among those of all batches that are merged.
    """
    return view_batch(batch, shared) if isinstance(batch, BaseBatch) else ArrayView(batch, shared, first)


def join_arrays(views: Sequence[BatchView]) -> None:
    """Gives the first view the rows of all views' arrays, which have the same paths."""
    parts = [view.arrays for view in views if isinstance(view, ArrayView)]
    for path in parts[0] if parts else ():
        parts[0][path] = np.concatenate([arrays[path] for arrays in parts])


class ArrayView(BatchView):
    """Rows of tensors and arrays; an array's field is the numbers of its rows, from 1 on, 0 for padding.

    Attributes:
        arrays: those with one row per sample, by path.
    """

    def __init__(self, batch: Any, shared: Collection[str] = (), first: int = 0) -> None:
        self.arrays = containers.arrays_of(batch, shared)
        self._first, self._given = first, shared
        super().__init__(batch, {*shared, *self.arrays})

    @cached_property
    def fields(self) -> dict[str, FieldValue]:
        """Fields as those of `BatchView`, and the row numbers of arrays, int64 `[rows]`."""
        if not self.arrays:
            return super().fields
        fields = containers.fields_of(self.batch, self._shared)
        some = next(iter(fields.values()), torch.empty(0))
        device = (some if isinstance(some, torch.Tensor) else some.values()).device
        for path, array in self.arrays.items():
            numbers = torch.arange(1, len(array) + 1, device=device)
            fields[containers.field_name(path, array)] = self._first + numbers
        return fields

    def view(self, batch: Any) -> BatchView:
        """Returns the view of a batch of this kind, which may have arrays, too."""
        return ArrayView(batch, self._given, self._first)

    def with_rows(self, fields: dict[str, FieldValue], batch_size: int, num_samples: int) -> Any:
        """Returns the batch with other rows, in arrays those that fields number; None or zero in padding."""
        arrays: dict[str, Any] = {}
        for path, array in self.arrays.items():
            name = containers.field_name(path, array)
            if name in fields:
                numbers = fields[name].cpu().numpy()
                empty = None if array.dtype == object else np.zeros((), array.dtype)
                arrays[name] = np.full((len(numbers), *array.shape[1:]), empty, array.dtype)
                arrays[name][numbers > 0] = array[numbers[numbers > 0] - 1]
        return super().with_rows(fields | arrays, batch_size, num_samples)
