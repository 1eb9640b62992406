"""The interface of sample sources, and helpers that build their batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..sequence_batch import BaseBatch


class SampleSource(Protocol):
    """Samples by index, of any type that `collate` accepts.

    An index gives the same sample in every process.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def collate(self, samples: Sequence[Any], batch_size: int) -> BaseBatch:
        """Returns a host batch of `batch_size` rows: the samples, then padding rows.

        Raises:
            ValueError: there are more samples than rows, or `batch_size` is 0.
        """


@runtime_checkable
class PerEpochSource(SampleSource, Protocol):
    """A source that redraws part of each sample every epoch, based only on the epoch and the index."""

    def for_epoch(self, epoch: int) -> Self:
        """Returns a new source of one epoch's samples. A running iteration keeps the source that it has."""


def keyed_rows(rows_by_key: Mapping[str, Sequence[np.ndarray]], batch_size: int) -> KeyedJaggedTensor:
    """Builds a KeyedJaggedTensor of `batch_size` rows: the given int64 rows, then padding rows of length 0.

    Raises:
        ValueError: a key has more than `batch_size` rows.
    """
    lengths = torch.zeros(len(rows_by_key), batch_size, dtype=torch.int64, device="cpu")
    for key_lengths, rows in zip(lengths, rows_by_key.values(), strict=True):
        if len(rows) > batch_size:
            raise ValueError(f"{len(rows)} samples do not fit in a batch of {batch_size} rows")
        key_lengths[: len(rows)] = torch.tensor([len(row) for row in rows], dtype=torch.int64, device="cpu")
    empty = np.empty(0, dtype=np.int64)  # concatenate needs at least one array
    values = np.concatenate([empty, *(row for rows in rows_by_key.values() for row in rows)])
    return KeyedJaggedTensor(
        keys=list(rows_by_key), values=torch.from_numpy(values), lengths=lengths.flatten()
    )


def padded(numbers: Sequence[int], batch_size: int) -> torch.Tensor:
    """Returns the samples' numbers, followed by zeros for padding rows, int64 `[batch_size]`."""
    rows = torch.zeros(batch_size, dtype=torch.int64, device="cpu")
    rows[: len(numbers)] = torch.tensor(numbers, device="cpu")
    return rows
