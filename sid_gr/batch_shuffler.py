"""The SID-GR model's batch shuffler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from commons.datasets import SIDBatch
from commons.distributed import BatchShuffler, register_batch_shuffler


@register_batch_shuffler("sid_gr")
class SIDGRBatchShuffler(BatchShuffler):
    """Balances the FLOPs of the decoder's layers.

    Args:
        flops: tokens to forward FLOPs, both `[batch]` integers; `transformer_flops` of a config.
        settings: those of `BatchShuffler`.
    """

    def __init__(self, flops: Callable[[torch.Tensor], torch.Tensor], **settings: Any) -> None:
        super().__init__(**settings)
        self._flops = flops

    def get_workloads(self, batch: SIDBatch) -> torch.Tensor:
        """Forward FLOPs of each row."""
        return self._flops(batch.num_tokens())
