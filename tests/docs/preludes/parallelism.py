"""A shuffler for the Python blocks of the page about parallelism."""

from typing import Any

import torch
import torch.distributed as dist

from commons.distributed import BatchShuffler

__all__ = ["ShopShuffler", "dist"]


class ShopShuffler(BatchShuffler):
    """A sample costs the square of its length."""

    def get_workloads(self, batch: Any) -> torch.Tensor:
        return batch["length"] ** 2
