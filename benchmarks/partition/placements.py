"""A global batch, and the ways to place its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.partition.lengths import Lengths
from commons.partition import karmarkar_karp, longest_processing_time, rebalance, refined
from commons.perf_model import HSTUFlops

ROWS_PER_RANK = 32
BYTES_PER_TOKEN = 24  # three int64 fields
RANKS_PER_NODE = 8


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one step, in the order in which the ranks loaded them.

    Attributes:
        ranks: number of ranks, which have loaded equally many samples.
        workloads, tokens, sizes: FLOPs, tokens, and bytes of each sample, int64 `[samples]`.
        home: rank that loaded each sample, int64 `[samples]`.
    """

    ranks: int
    workloads: np.ndarray
    tokens: np.ndarray
    sizes: np.ndarray
    home: np.ndarray

    def rebalance(self, **options: object) -> list[np.ndarray]:
        """Returns each rank's sample indices from `rebalance`, which takes bytes into account."""
        return rebalance(self.workloads, self.home, self.ranks, sizes=self.sizes, **options)


# Functions that return each rank's sample indices, by name. Nodes matter only if there are several nodes.
AS_LOADED, REBALANCE_NODES, UNEQUAL_ROWS = "as loaded", "rebalance, nodes of 8", "refined, unequal rows"
PLACEMENTS: dict[str, Callable[[GlobalBatch], list[np.ndarray]]] = {
    AS_LOADED: lambda batch: np.split(np.arange(len(batch.home)), batch.ranks),
    "karmarkar_karp": lambda batch: karmarkar_karp(batch.workloads, batch.ranks),
    "longest_processing_time": lambda batch: longest_processing_time(batch.workloads, batch.ranks),
    "refined": lambda batch: refined(batch.workloads, batch.ranks),
    UNEQUAL_ROWS: lambda batch: refined(batch.workloads, batch.ranks, equal_size=False),
    "rebalance": lambda batch: batch.rebalance(),
    REBALANCE_NODES: lambda batch: batch.rebalance(ranks_per_node=RANKS_PER_NODE),
}


def compute_workloads(lengths: np.ndarray, hidden_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each sample's FLOPs in one HSTU layer, and its tokens, 2·n + 1 for n items."""
    tokens = 2 * lengths.astype(np.int64) + 1
    return make_flops(hidden_size).per_sample(tokens), tokens


def make_flops(hidden_size: int) -> HSTUFlops:
    """Returns the formula for the FLOPs of one HSTU layer."""
    return HSTUFlops(num_layers=1, hidden_size=hidden_size, num_heads=1, head_dim=hidden_size)


def draw_batches(lengths: Lengths, hidden_size: int, ranks: int, draws: int) -> list[GlobalBatch]:
    """Returns random batches, whose lengths are the same for every hidden size."""
    rng = np.random.default_rng([0, ranks])
    home = np.repeat(np.arange(ranks), ROWS_PER_RANK)
    batches = []
    for _ in range(draws):
        workloads, tokens = compute_workloads(lengths(rng, ROWS_PER_RANK * ranks), hidden_size)
        batches.append(GlobalBatch(ranks, workloads, tokens, BYTES_PER_TOKEN * tokens, home))
    return batches
