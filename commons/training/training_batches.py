"""The batches of a training, in their order."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from commons.datasets import SequenceDataset
from commons.sequence_batch import BaseBatch
from commons.training.progress import Progress


def training_batches(
    dataset: SequenceDataset, device: torch.device, progress: Progress
) -> Iterator[BaseBatch]:
    """Batches of one epoch after the other from where training has come to, without end."""
    epoch, sample = progress.epoch, progress.sample
    while dataset.loads_here:
        dataset.set_epoch(epoch, sample)
        yield from on_host(dataset, device)
        epoch, sample = epoch + 1, 0


def steps_left(dataset: SequenceDataset, progress: Progress) -> int:
    """Of the first epoch."""
    if progress.epoch:
        return 0
    return -(-(dataset.num_samples - progress.sample) // dataset.samples_per_step)


def on_host(dataset: SequenceDataset, device: torch.device) -> Iterator[BaseBatch]:
    """The dataset's batches, in pinned memory if they go to a GPU."""
    return (batch.pin_memory() for batch in dataset) if device.type == "cuda" else iter(dataset)
