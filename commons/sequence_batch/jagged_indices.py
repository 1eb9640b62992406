"""Index arithmetic on jagged rows."""

from __future__ import annotations

import torch


def spread(starts: torch.Tensor, lengths: torch.Tensor, total: int, step: int = 1) -> torch.Tensor:
    """Returns for each row b the `lengths[b]` indices `starts[b]`, `starts[b] + step`, …; int64 `[total]`.

    Args:
        starts, lengths: `[B]` integers.
        total: the sum of `lengths`; passed in so that nothing is read from the device.
        step: the difference between an index of a row and the next.
    """
    lengths = lengths.long()
    before = lengths.cumsum(0) - lengths
    first = torch.sub(starts.long(), before, alpha=step).repeat_interleave(lengths, output_size=total)
    return first.add_(torch.arange(total, device=starts.device), alpha=step)


def first_values(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns the first value of each row, 0 for an empty one, `[B]` of the values' dtype; on the host.

    Args:
        values: of all rows.
        lengths: `[B]` integers.
    """
    lengths = lengths.long()
    first = torch.zeros_like(lengths, dtype=values.dtype)
    starts = lengths.cumsum(0) - lengths
    first[lengths > 0] = values[starts[lengths > 0]]
    return first
