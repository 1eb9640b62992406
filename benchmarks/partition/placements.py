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
        ranks: each has loaded as many samples as any other.
        workloads, tokens, sizes: int64 `[samples]`; FLOPs, tokens and bytes.
        home: int64 `[samples]`, the rank that loaded each.
    """

    ranks: int
    workloads: np.ndarray
    tokens: np.ndarray
    sizes: np.ndarray
    home: np.ndarray


@dataclass(frozen=True)
class Placement:
    """One way to place samples.

    Attributes:
        place: to the indices of each rank's samples.
        equal_rows: whether every rank gets as many samples as any other.
        is_slow: too slow to be called as often as the others.
    """

    place: Callable[[GlobalBatch], list[np.ndarray]]
    equal_rows: bool = True
    is_slow: bool = False


AS_LOADED, REBALANCE_NODES = "as loaded", "rebalance, nodes of 8"
PLACEMENTS: dict[str, Placement] = {
    AS_LOADED: Placement(lambda batch: np.split(np.arange(len(batch.home)), batch.ranks)),
    "karmarkar_karp": Placement(lambda batch: karmarkar_karp(batch.workloads, batch.ranks)),
    "karmarkar_karp, unequal rows": Placement(
        lambda batch: karmarkar_karp(batch.workloads, batch.ranks, equal_size=False),
        equal_rows=False,
        is_slow=True,
    ),
    "longest_processing_time": Placement(lambda batch: longest_processing_time(batch.workloads, batch.ranks)),
    "refined": Placement(lambda batch: refined(batch.workloads, batch.ranks)),
    "refined, unequal rows": Placement(
        lambda batch: refined(batch.workloads, batch.ranks, equal_size=False), equal_rows=False
    ),
    "rebalance": Placement(
        lambda batch: rebalance(batch.workloads, batch.home, batch.ranks, sizes=batch.sizes)
    ),
    REBALANCE_NODES: Placement(
        lambda batch: rebalance(
            batch.workloads, batch.home, batch.ranks, sizes=batch.sizes, ranks_per_node=RANKS_PER_NODE
        )
    ),
    "rebalance, unequal rows": Placement(
        lambda batch: rebalance(
            batch.workloads, batch.home, batch.ranks, sizes=batch.sizes, equal_size=False
        ),
        equal_rows=False,
    ),
}


def placements_at(ranks: int) -> dict[str, Placement]:
    """By name; those that know of nodes only where there are several."""
    return {
        name: placement
        for name, placement in PLACEMENTS.items()
        if name != REBALANCE_NODES or ranks > RANKS_PER_NODE
    }


def workloads_of(lengths: np.ndarray, hidden_size: int) -> tuple[np.ndarray, np.ndarray]:
    """FLOPs of one HSTU layer, and tokens: of n items 2·n + 1."""
    tokens = 2 * lengths.astype(np.int64) + 1
    return hstu_flops(hidden_size).per_sample(tokens), tokens


def hstu_flops(hidden_size: int) -> HSTUFlops:
    """FLOPs of one HSTU layer."""
    return HSTUFlops(num_layers=1, hidden_size=hidden_size, num_heads=1, head_dim=hidden_size)


def draw_batches(lengths: Lengths, hidden_size: int, ranks: int, draws: int) -> list[GlobalBatch]:
    """The same lengths for every hidden size."""
    rng = np.random.default_rng([0, ranks])
    home = np.repeat(np.arange(ranks), ROWS_PER_RANK)
    batches = []
    for _ in range(draws):
        workloads, tokens = workloads_of(lengths(rng, ROWS_PER_RANK * ranks), hidden_size)
        batches.append(GlobalBatch(ranks, workloads, tokens, BYTES_PER_TOKEN * tokens, home))
    return batches
