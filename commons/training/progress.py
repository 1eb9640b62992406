"""How far a training has come."""

from __future__ import annotations

from dataclasses import dataclass

from commons.datasets import SequenceDataset


@dataclass(frozen=True)
class Progress:
    """How far a training has come, whatever the number of ranks.

    Attributes:
        step: steps that were computed.
        epoch: the epoch that the next one is of.
        sample: samples of that epoch, over all ranks, that were computed.
    """

    step: int = 0
    epoch: int = 0
    sample: int = 0

    def after_step(self, dataset: SequenceDataset) -> Progress:
        """After one more step over `dataset`."""
        sample = self.sample + dataset.samples_per_step
        if sample >= dataset.num_samples:
            return Progress(self.step + 1, self.epoch + 1)
        return Progress(self.step + 1, self.epoch, sample)
