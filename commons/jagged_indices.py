"""Indices into the values of jagged tensors, made without waits of the host for a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .sequence_batch.packed_rows import to_device


def spread(starts: torch.Tensor, lengths: torch.Tensor, total: int, step: int = 1) -> torch.Tensor:
    """Returns `lengths[b]` indices for each row b: `starts[b]`, `starts[b] + step`, …; int64 `[total]`.

    `starts` and `lengths` are `[B]` integers. `total` is the sum of `lengths`, so that no device is read.
    """
    lengths = lengths.long()
    before = lengths.cumsum(0) - lengths
    first = torch.sub(starts.long(), before, alpha=step).repeat_interleave(lengths, output_size=total)
    return first.add_(torch.arange(total, device=starts.device), alpha=step)


def to_device_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copies flat int64 arrays to a device at once, from pinned memory so that the host does not wait."""
    together = torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
    return list(to_device(together, device).split([len(array) for array in arrays]))
