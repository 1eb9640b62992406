"""Counts the ids that each rank's tables receive from TorchRec's input distribution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from .partition.balance import relative_to_mean


class ReceivedIds:
    """Counts the ids that this rank looks up for all ranks, with hooks that stay on the model's lookups.

    An id that occurs n times counts n times, unless TorchRec removes duplicates before it sends ids. Only
    training counts. The host knows how many ids a rank receives for all tables of one sharding, but not for
    each table. So two small kernels per sharding and step add up lengths on the device, and nothing waits.

    Args:
        model: model with sharded tables.

    Raises:
        ValueError: the model has no sharded tables.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._tables: dict[torch.nn.Module, list[str]] = {}
        self._sums: dict[torch.nn.Module, torch.Tensor] = {}
        for owner, lookup in _lookups(model):
            configs = [table for group in lookup.grouped_configs for table in group.embedding_tables]
            self._tables[lookup] = [table.name for table in configs for _ in table.feature_names]
            # A lookup is not a submodule of its owner, so only the owner knows whether it trains.
            lookup.register_forward_pre_hook(partial(self._count, owner))
        if not self._tables:
            raise ValueError("count_ids=True counts the ids of sharded tables, and the model has none")

    def take(self) -> dict[str, int]:
        """Returns how many ids this rank received since the last call, by table. Waits for the device."""
        counts = dict.fromkeys((name for names in self._tables.values() for name in names), 0)
        for lookup, sums in self._sums.items():
            for name, count in zip(self._tables[lookup], sums.tolist(), strict=True):
                counts[name] += count
        self._sums = {}
        return counts

    def _count(self, owner: torch.nn.Module, lookup: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if owner.training and self._tables[lookup]:
            sums = sums_by_key(inputs[0])
            before = self._sums.get(lookup)
            self._sums[lookup] = sums if before is None else before + sums


def received_figures(of_ranks: Sequence[Mapping[str, int]], num_steps: int) -> dict[str, Any]:
    """Returns the ids received per step: `ids_received` of all tables, `ids_received/<table>` of each.

    Each is a list with one entry per rank. `ids_imbalance` and `ids_imbalance/<table>` are largest ÷ mean.
    `of_ranks` has the numbers of ids that each rank received in all steps, by table.
    """
    tables = sorted({name for counts in of_ranks for name in counts})
    counts = np.array([[counts.get(name, 0) for name in tables] for counts in of_ranks])
    figures: dict[str, Any] = {}
    for name, received in zip(
        ("", *(f"/{table}" for table in tables)), (counts.sum(1), *counts.T), strict=True
    ):
        figures[f"ids_received{name}"] = np.round(received / num_steps, 3).tolist()
        figures[f"ids_imbalance{name}"] = relative_to_mean(received)
    return figures


def _lookups(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Yields (sharded module, lookup) pairs. A module calls one lookup per sharding, on the received ids."""
    for module in model.modules():
        if isinstance(module, ShardedModule):
            for lookup in getattr(module, "_lookups", ()):
                replicated = isinstance(lookup, torch.nn.parallel.DistributedDataParallel)
                yield module, lookup.module if replicated else lookup


def sums_by_key(features: KeyedJaggedTensor) -> torch.Tensor:
    """Returns the number of ids of each key, int64 `[keys]`, on the device."""
    lengths = features.lengths()
    if features.variable_stride_per_key():
        return torch.stack([part.sum() for part in lengths.split(features.stride_per_key())])
    return lengths.view(len(features.keys()), -1).sum(1)
