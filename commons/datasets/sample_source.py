"""What samples come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self, runtime_checkable

from commons.sequence_batch import BaseBatch


class SampleSource(Protocol):
    """Samples by index, of any kind that `collate` takes. The same index gives the same in every process."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def collate(self, samples: Sequence[Any], batch_size: int) -> BaseBatch:
        """A host batch of `batch_size` rows: the samples, then padding rows.

        Raises:
            ValueError: there are more samples than rows, or there is no row.
        """


@runtime_checkable
class PerEpochSource(SampleSource, Protocol):
    """Samples that are in part drawn anew each epoch, from the epoch and their index alone."""

    def of_epoch(self, epoch: int) -> Self:
        """The samples of one epoch. Another object: an iteration that is under way keeps its own."""
