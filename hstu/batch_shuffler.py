"""The HSTU models' batch shuffler."""

from __future__ import annotations

from typing import Any

import torch

from commons.datasets import HSTUBatch
from commons.distributed import BatchShuffler, register_batch_shuffler
from commons.perf_model import HSTUFlops


@register_batch_shuffler("hstu")
class HSTUBatchShuffler(BatchShuffler):
    """Balances the FLOPs of the HSTU layers; further arguments are those of `BatchShuffler`."""

    def __init__(self, flops: HSTUFlops, **settings: Any) -> None:
        super().__init__(**settings)
        self._flops = flops

    def get_workloads(self, batch: HSTUBatch) -> torch.Tensor:
        """Forward FLOPs of each row."""
        return self._flops.per_sample(batch.num_tokens())
