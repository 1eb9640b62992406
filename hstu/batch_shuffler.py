"""The HSTU models' batch shuffler."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from commons.datasets import HSTUBatch
from commons.distributed import BatchShuffler, register_batch_shuffler
from commons.perf_model import HSTUFlops

logger = logging.getLogger(__name__)


@register_batch_shuffler("hstu")
class HSTUBatchShuffler(BatchShuffler):
    """Balances the FLOPs of the HSTU layers: columns of matrix products and of attention.

    Takes either `flops`, or the heads alone like the shuffler of recsys-examples. Tokens are always counted
    from the batch, which knows whether its items have actions.

    Args:
        flops: cost of the layers.
        num_heads, head_dim: attention heads; their product is the hidden size. One layer is counted, because
            more layers scale every load alike.
        action_interleaved: accepted for recsys-examples; False has no effect and gives a warning.
        settings: settings of `BatchShuffler`.

    Raises:
        TypeError: neither `flops` nor both of `num_heads` and `head_dim` are given, or all are.
        ValueError: a size is not positive.
    """

    unit = "FLOPs"

    def __init__(
        self,
        flops: HSTUFlops | None = None,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        action_interleaved: bool = True,
        **settings: Any,
    ) -> None:
        if (flops is None) == (num_heads is None) or (num_heads is None) != (head_dim is None):
            raise TypeError(
                f'batch shuffler "hstu": flops = {flops}, num_heads = {num_heads}, head_dim = {head_dim}; '
                "expected either flops=HSTUFlops(...), or both num_heads= and head_dim="
            )
        if num_heads is not None and head_dim is not None:
            flops = HSTUFlops(1, num_heads * head_dim, num_heads, head_dim)
        assert flops is not None
        super().__init__(**settings)
        self._flops = flops
        if not action_interleaved and self.group.rank == 0:
            logger.warning(
                'batch shuffler "hstu": action_interleaved = False has no effect: tokens are counted from '
                "the batch, actions included where it has them"
            )

    def get_workloads(self, batch: HSTUBatch) -> torch.Tensor:
        """Returns the forward FLOPs of each row, `[batch_size, 2]`."""
        return flops_of_rows(self._flops, batch)

    def prefix_cost(self, tokens: np.ndarray, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the forward FLOPs of the first tokens' queries, `[cuts, 2]`."""
        return self._flops.prefix_work(tokens, counts["tokens"], counts["head_tokens"], counts["kept_tokens"])


def flops_of_rows(flops: HSTUFlops, batch: HSTUBatch) -> torch.Tensor:
    """Returns the forward FLOPs of each row of a batch, `[batch_size, 2]` int64, as `HSTUFlops.work` does."""
    return flops.work(batch.num_tokens(), batch.num_contextual_tokens(), batch.num_candidate_tokens())
