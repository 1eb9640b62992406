"""The SID-GR model's batch shuffler."""

from __future__ import annotations

from typing import Any

import torch

from commons.datasets import SIDBatch
from commons.distributed import BatchShuffler, register_batch_shuffler
from commons.perf_model import DecoderFlops


@register_batch_shuffler("sid_gr")
class SIDGRBatchShuffler(BatchShuffler):
    """Balances the FLOPs of the decoder's layers; further arguments are those of `BatchShuffler`."""

    def __init__(self, flops: DecoderFlops, **settings: Any) -> None:
        super().__init__(**settings)
        self._flops = flops

    def get_workloads(self, batch: SIDBatch) -> torch.Tensor:
        """Forward FLOPs of each row."""
        return self._flops.per_sample(batch.num_tokens())
