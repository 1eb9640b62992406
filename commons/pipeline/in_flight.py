"""Wraps batches of any type for TorchRec's pipelines."""

from __future__ import annotations

from typing import Any, Self

import torch
from torchrec.streamable import Pipelineable

from ..sequence_batch import containers


class InFlightBatch(Pipelineable):
    """Gives any batch the methods of a `Pipelineable`; attributes and items are those of the batch.

    Args:
        batch: of any type that the stage can exchange.
    """

    def __init__(self, batch: Any) -> None:
        self._landed = batch

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The batch with every tensor on `device`."""
        return type(self)(containers.moved_to(self._landed, device, non_blocking))

    def pin_memory(self) -> Self:
        """The batch with every tensor in pinned host memory."""
        return type(self)(containers.pinned(self._landed))

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that `stream` uses the batch's tensors."""
        containers.record_stream(self._landed, stream)

    def __getattr__(self, name: str) -> Any:
        if name == "_landed":  # not there yet, as in copy.copy
            raise AttributeError(name)
        return getattr(self._landed, name)

    def __getitem__(self, key: Any) -> Any:
        return self._landed[key]


def in_flight(batch: Any) -> Any:
    """Wraps a batch for TorchRec's pipelines, unless it is a `Pipelineable` or None."""
    return batch if batch is None or isinstance(batch, Pipelineable) else InFlightBatch(batch)


def landed(batch: Any) -> Any:
    """Unwraps a batch of `in_flight`."""
    return batch._landed if isinstance(batch, InFlightBatch) else batch
