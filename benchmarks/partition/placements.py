"""Lengths of histories, global batches of them, and the ways to place their samples."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from commons.partition import karmarkar_karp, longest_processing_time, rebalance, refined
from commons.perf_model import HSTUFlops

# A function that draws the lengths of a number of histories.
Lengths = Callable[[np.random.Generator, int], np.ndarray]

ML_100K, ML_100K_NEWEST = "ml-100k", "ml-100k, newest 200"
LOGNORMAL, ZIPF, UNIFORM = "lognormal(5, 1.2)", "zipf(1.2)", "uniform in [1, 200]"
PARETO_1_6, PARETO_1_1 = "Pareto(1.6) to 4096", "Pareto(1.1) to 16384"
LONG = "lognormal, median 8591"
LONGEST, NEWEST = 4096, 200
# Mean, median, smallest, and largest number of events per user in public data sets.
YAMBDA, KUAIRAND, TAOBAO = "Yambda-5B", "KuaiRand-27K", "Taobao"
PUBLISHED = {
    YAMBDA: (4763, 2695, 1, 27_738),
    KUAIRAND: (11_796, 8591, 100, 228_000),
    TAOBAO: (101.4, 75, 1, 848),
}

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


def find_movielens(given: Path | None) -> Path | None:
    """Returns the folder of MovieLens 100K that the user named, or prints a warning and returns None."""
    if given is not None and (given / "u.data").exists():
        return given
    place = "no folder with u.data was named" if given is None else f"no u.data in {given}"
    print(f"without MovieLens 100K: {place}; its rows are left out, and nothing is written", file=sys.stderr)
    return None


def read_movielens_lengths(movielens: Path) -> np.ndarray:
    """Returns each user's number of ratings in MovieLens 100K's `u.data`, int64 `[users]`."""
    users = np.loadtxt(movielens / "u.data", usecols=0, dtype=np.int64)
    return np.bincount(users)[1:]  # user ids begin at 1


def draw_lognormal(rng: np.random.Generator, count: int) -> np.ndarray:
    """Returns `count` random lengths with a heavy tail, like that of histories that nobody caps."""
    return rng.lognormal(5, 1.2, count).clip(1, LONGEST).astype(np.int64)


def list_lengths(movielens: Path | None) -> dict[str, Lengths]:
    """Returns all distributions by name. MovieLens 100K's need its folder, and draw with replacement."""
    lengths: dict[str, Lengths] = {}
    if movielens is not None:
        ratings = read_movielens_lengths(movielens)
        lengths[ML_100K] = lambda rng, n: rng.choice(ratings, n)
        lengths[ML_100K_NEWEST] = lambda rng, n: rng.choice(ratings, n).clip(max=NEWEST)
    lengths[LOGNORMAL] = draw_lognormal
    lengths[ZIPF] = lambda rng, n: rng.zipf(1.2, n).clip(1, LONGEST)
    lengths[UNIFORM] = lambda rng, n: rng.integers(1, NEWEST + 1, n)
    lengths |= {name: _fit_lognormal(*figures) for name, figures in PUBLISHED.items()}
    # Histories so long that whole samples cannot be balanced.
    lengths[PARETO_1_6] = lambda rng, n: (20 * (1 + rng.pareto(1.6, n))).clip(max=4096)
    lengths[PARETO_1_1] = lambda rng, n: (10 * (1 + rng.pareto(1.1, n))).clip(max=16384)
    lengths[LONG] = lambda rng, n: rng.lognormal(np.log(8591), 1.2, n).clip(1, 65536)
    return lengths


def _fit_lognormal(mean: float, median: float, least: int, most: int) -> Lengths:
    """Returns a lognormal distribution of this mean and median, which is clipped to [`least`, `most`]."""
    location, scale = np.log(median), np.sqrt(2 * np.log(mean / median))
    return lambda rng, n: rng.lognormal(location, scale, n).clip(least, most).astype(np.int64)
