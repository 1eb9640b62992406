"""Batches on their way through TorchRec's pipelines, with the plans of their steps."""

from __future__ import annotations

from typing import Any, Self

import torch
from torchrec.streamable import Pipelineable

from ..distributed.plan_ahead import PlannedStep
from ..sequence_batch import containers


class InFlightBatch(Pipelineable):
    """Gives any batch the methods of a `Pipelineable`; attributes and items are those of the batch.

    Args:
        batch: of any type that the stage can exchange.
        step: that the batch belongs to.
    """

    def __init__(self, batch: Any, step: PlannedStep) -> None:
        self._landed, self._step = batch, step

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Returns the batch with every tensor on `device`."""
        batch = self._landed
        if isinstance(batch, Pipelineable):
            return type(self)(batch.to(device, non_blocking), self._step)
        return type(self)(containers.move_to(batch, device, non_blocking), self._step)

    def pin_memory(self) -> Self:
        """Returns the batch with every tensor in pinned host memory."""
        batch = self._landed
        pinned = batch.pin_memory() if isinstance(batch, Pipelineable) else containers.pin(batch)
        return type(self)(pinned, self._step)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that `stream` uses the batch's tensors."""
        if isinstance(self._landed, Pipelineable):
            self._landed.record_stream(stream)
        else:
            containers.record_stream(self._landed, stream)

    def __getattr__(self, name: str) -> Any:
        if name in ("_landed", "_step"):  # not there yet, as in copy.copy
            raise AttributeError(name)
        return getattr(self._landed, name)

    def __getitem__(self, key: Any) -> Any:
        return self._landed[key]


def land(batch: InFlightBatch) -> tuple[Any, PlannedStep]:
    """Unwraps a batch, and returns its step with it."""
    return batch._landed, batch._step
