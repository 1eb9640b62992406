"""Rows of ids to a KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def keyed_rows(rows_by_key: Mapping[str, Sequence[np.ndarray]], batch_size: int) -> KeyedJaggedTensor:
    """Every key's rows, and zero-length ones behind them up to `batch_size`.

    Args:
        rows_by_key: of each key, int64 arrays `[ids]`.
        batch_size: rows of the result.

    Raises:
        ValueError: a key has more rows than `batch_size`.
    """
    lengths = torch.zeros(len(rows_by_key), batch_size, dtype=torch.int64)
    for key_lengths, rows in zip(lengths, rows_by_key.values(), strict=True):
        if len(rows) > batch_size:
            raise ValueError(f"{len(rows)} samples do not fit in a batch of {batch_size} rows")
        key_lengths[: len(rows)] = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    empty = np.empty(0, dtype=np.int64)  # concatenate needs at least one array
    values = np.concatenate([empty, *(row for rows in rows_by_key.values() for row in rows)])
    return KeyedJaggedTensor(
        keys=list(rows_by_key), values=torch.from_numpy(values), lengths=lengths.flatten()
    )
