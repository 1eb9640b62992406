"""Which sample goes to which rank."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class ShufflePlan:
    """The placement of one global batch; plain data, equal on every rank.

    Samples are numbered over the ranks: first the real rows of rank 0, then those of rank 1, and so on.

    Attributes:
        batch_sizes: int64 `[ranks]`, rows that each rank loaded; 0 where a rank had no batch left.
        num_loaded: int64 `[ranks]`, real rows that each rank loaded.
        workloads: int64 `[samples]`, in FLOPs or nanoseconds, as the shuffler counts.
        tokens: int64 `[samples]`.
        loss_tokens: int64 `[samples]`.
        num_elements: int64 `[samples, jagged fields]`, elements of each sample in each jagged field.
        sample_bytes: int64 `[samples]`, bytes that a sample takes when it is sent.
        partition: for each rank, the ascending numbers of the samples it will compute.
        rows: int64 `[ranks]`, rows that each rank's batch will have, padding included.
    """

    batch_sizes: np.ndarray
    num_loaded: np.ndarray
    workloads: np.ndarray
    tokens: np.ndarray
    loss_tokens: np.ndarray
    num_elements: np.ndarray
    sample_bytes: np.ndarray
    partition: tuple[np.ndarray, ...]
    rows: np.ndarray

    @property
    def num_ranks(self) -> int:
        """Ranks that the plan balances among."""
        return len(self.batch_sizes)

    @property
    def has_batch(self) -> bool:
        """Whether any rank loaded a batch; if none did, all loaders have ended."""
        return bool(self.batch_sizes.any())

    @property
    def num_loss_tokens(self) -> int:
        """Loss tokens of the ranks together."""
        return int(self.loss_tokens.sum())

    @cached_property
    def home(self) -> np.ndarray:
        """int64 `[samples]`, the rank that each sample was loaded on."""
        return np.repeat(np.arange(self.num_ranks), self.num_loaded)

    @cached_property
    def home_start(self) -> np.ndarray:
        """int64 `[ranks]`, number of the first sample that each rank loaded."""
        return np.cumsum(self.num_loaded) - self.num_loaded

    @cached_property
    def destination(self) -> np.ndarray:
        """int64 `[samples]`, the rank that will compute each sample."""
        destination = np.empty(len(self.workloads), dtype=np.int64)
        for rank, samples in enumerate(self.partition):
            destination[samples] = rank
        return destination

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShufflePlan):
            return NotImplemented
        if len(self.partition) != len(other.partition):
            return False
        pairs = [
            (getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.name != "partition"
        ]
        pairs += zip(self.partition, other.partition, strict=True)
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)
