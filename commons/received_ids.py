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
    """Counts the ids that this rank looks up for all ranks, by hooks that stay on the model's lookups.

    An id that occurs n times counts n times, unless TorchRec removes duplicates before it sends. Only
    training counts. The host knows how many ids a rank received for all tables of one sharding, but not for
    which. So lengths are added up on the device, in two small kernels per sharding and step: nothing waits.

    Args:
        model: model with sharded tables.

    Raises:
        ValueError: it has none.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._tables: dict[torch.nn.Module, list[str]] = {}
        self._sums: dict[torch.nn.Module, torch.Tensor] = {}
        for owner, lookup in _lookups(model):
            configs = [table for group in lookup.grouped_configs for table in group.embedding_tables]
            self._tables[lookup] = [table.name for table in configs for _ in table.feature_names]
            # A lookup is no submodule of its owner, and so does not know whether it trains.
            lookup.register_forward_pre_hook(partial(self._count, owner))
        if not self._tables:
            raise ValueError("count_ids=True counts the ids of sharded tables, and the model has none")

    def take(self) -> dict[str, int]:
        """Returns the ids received since the last call, by table of this rank; waits for the device."""
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
    """Returns ids received per step as `ids_received`, of all tables, and `ids_received/<table>`.

    Each is a list with one entry per rank. `ids_imbalance` and `ids_imbalance/<table>` are largest ÷ mean.
    `of_ranks` are the ids that each rank received in all steps, by table.
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
    """Yields sharded modules, each with its lookups, which it calls once per sharding after the exchange."""
    for module in model.modules():
        if isinstance(module, ShardedModule):
            for lookup in getattr(module, "_lookups", ()):
                replicated = isinstance(lookup, torch.nn.parallel.DistributedDataParallel)
                yield module, lookup.module if replicated else lookup


def sums_by_key(features: KeyedJaggedTensor) -> torch.Tensor:
    """Returns how many ids each key has, int64 `[keys]`, on the device."""
    lengths = features.lengths()
    if features.variable_stride_per_key():
        return torch.stack([part.sum() for part in lengths.split(features.stride_per_key())])
    return lengths.view(len(features.keys()), -1).sum(1)
