"""Keys and values that pieces of samples see, gathered from this rank's tokens and fetched ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from hstu.modules.attention_mask import SampleMask


@dataclass(frozen=True)
class KeyRun:
    """The locations of tokens, such as the first tokens of one sample, in order.

    This rank's n tokens have locations 0 to n - 1; fetched tokens follow.

    Attributes:
        segments: first and last location, exclusive, of each stretch of consecutive locations.
    """

    segments: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, locations: np.ndarray) -> KeyRun:
        """Returns the run of these locations, int64 `[tokens]`."""
        stretches = np.split(locations, np.flatnonzero(np.diff(locations) != 1) + 1)
        return cls(tuple((int(part[0]), int(part[-1]) + 1) for part in stretches if len(part)))

    @property
    def end(self) -> int:
        """Number of own and fetched tokens that the run requires."""
        return max((last for _, last in self.segments), default=0)

    def gather(
        self,
        own: torch.Tensor,
        fetched: torch.Tensor,
        heads: slice = slice(None),
        copied: bool = False,
    ) -> torch.Tensor:
        """Returns the run's tokens, `[tokens, heads, D]`; a view if one slice holds them, unless `copied`.

        Args:
            own, fetched: `[n, H, D]` and `[fetched tokens, H, D]`.
            heads: the heads to gather.
            copied: whether the caller writes to the result.
        """
        parts = list(self._parts(own, fetched, heads)) or [own[:0, heads]]
        return parts[0] if len(parts) == 1 and not copied else torch.cat(parts)

    def add(
        self, grads: torch.Tensor, own: torch.Tensor, fetched: torch.Tensor, heads: slice = slice(None)
    ) -> None:
        """Adds the gradients of gathered tokens to the gradients of their origins; the adjoint of `gather`.

        The additions run in the order of the segments, so that sums are deterministic.

        Args:
            grads: `[tokens, heads, D]`.
            own, fetched: `[n, H, D]` and `[fetched tokens, H, D]`, updated in place.
            heads: the heads of `grads`.
        """
        first = 0
        for part in self._parts(own, fetched, heads):
            part.add_(grads[first : first + len(part)])
            first += len(part)

    def _parts(self, own: torch.Tensor, fetched: torch.Tensor, heads: slice) -> Iterator[torch.Tensor]:
        """Yields views of each segment's tokens; own tokens and then fetched ones may share a segment."""
        num_own = len(own)
        for first, last in self.segments:
            if first < num_own:
                yield own[first:last, heads]
            if last > num_own:
                yield fetched[max(first - num_own, 0) : last - num_own, heads]


def key_runs(key_tokens: np.ndarray, masks: Sequence[SampleMask]) -> list[KeyRun]:
    """Returns the run of each piece's keys.

    Args:
        key_tokens: locations of each mask's `num_tokens` keys, int64, piece by piece.
        masks: masks of the pieces.

    Raises:
        ValueError: the number of locations differs from the number of keys.
    """
    ends = list(accumulate(mask.num_tokens for mask in masks))
    num_keys = ends[-1] if ends else 0
    if len(key_tokens) != num_keys:
        raise ValueError(f"key_tokens has {len(key_tokens)} locations, but the masks have {num_keys} keys")
    return [KeyRun.of(key_tokens[end - mask.num_tokens : end]) for mask, end in zip(masks, ends, strict=True)]
