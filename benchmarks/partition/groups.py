"""Samples of one user share ids: how many ids ranks look up, and what keeping users together costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.partition.lengths import LOGNORMAL, Lengths, lognormal
from benchmarks.partition.placements import BYTES_PER_TOKEN, ROWS_PER_RANK, workloads_of
from commons.partition import imbalance, karmarkar_karp, lower_bound, rebalance, refined

LENGTHS: dict[str, Lengths] = {"20 to 200": lambda rng, n: rng.integers(20, 201, n), LOGNORMAL: lognormal}
SAMPLES_PER_USER, RANKS, HIDDEN_SIZE = (4, 16), (8, 64), 128
SHARED = 0.9  # of a sample's ids, with all other samples of its user
TOLERANCES = (0.005, 0.01, 0.02, 0.05, 0.1)


@dataclass(frozen=True)
class UserMajorBatch:
    """The samples of one step, in which those of a user follow one another.

    Attributes:
        ranks: each has loaded as many samples as any other.
        workloads, sizes: int64 `[samples]`, FLOPs and bytes.
        user, home: int64 `[samples]`, the user of each, and the rank that loaded it.
        ids: int64 `[users]`, ids that all samples of a user have.
        own: int64 `[users]`, ids that one sample alone has.
    """

    ranks: int
    workloads: np.ndarray
    sizes: np.ndarray
    user: np.ndarray
    home: np.ndarray
    ids: np.ndarray
    own: np.ndarray

    def unique_ids(self, partition: list[np.ndarray]) -> np.ndarray:
        """Returns the different ids on each rank, int64 `[ranks]`."""
        return np.array(
            [
                self.own[self.user[samples]].sum() + self.ids[np.unique(self.user[samples])].sum()
                for samples in partition
            ]
        )


Place = Callable[[UserMajorBatch, float], list[np.ndarray]]
PLACEMENTS: dict[str, Place] = {
    "karmarkar_karp": lambda batch, _: karmarkar_karp(batch.workloads, batch.ranks),
    "refined": lambda batch, _: refined(batch.workloads, batch.ranks),
    "rebalance": lambda batch, tolerance: rebalance(
        batch.workloads, batch.home, batch.ranks, tolerance, batch.sizes
    ),
    "rebalance, groups": lambda batch, tolerance: rebalance(
        batch.workloads, batch.home, batch.ranks, tolerance, batch.sizes, groups=batch.user
    ),
}
WITH_TOLERANCE = ("rebalance", "rebalance, groups")


def measure_groups(draws: int) -> list[dict[str, Any]]:
    """A record for each lengths, samples per user, ranks, placement and tolerance."""
    cases = [(name, per_user, ranks) for name in LENGTHS for per_user in SAMPLES_PER_USER for ranks in RANKS]
    records = []
    for name, per_user, ranks in tqdm(cases, desc="groups"):
        rng = np.random.default_rng([0, ranks])
        batches = [draw_users(LENGTHS[name], per_user, ranks, rng) for _ in range(draws)]
        case = {"lengths": name, "samples_per_user": per_user, "ranks": ranks, "draws": draws}
        for placement, place in PLACEMENTS.items():
            for tolerance in TOLERANCES if placement in WITH_TOLERANCE else (None,):
                figures = [_figures(batch, place, tolerance or 0.0) for batch in batches]
                means = {key: round(float(np.mean([of[key] for of in figures])), 4) for key in figures[0]}
                means["ms"] = round(float(np.median([of["ms"] for of in figures])), 4)
                records.append({**case, "placement": placement, "tolerance": tolerance, **means})
    return records


def draw_users(lengths: Lengths, per_user: int, ranks: int, rng: np.random.Generator) -> UserMajorBatch:
    """Draws users of equally long samples."""
    of_users = lengths(rng, ROWS_PER_RANK * ranks // per_user).astype(np.int64)
    own = np.rint((1 - SHARED) * of_users).astype(np.int64)
    user = np.repeat(np.arange(len(of_users)), per_user)
    workloads, tokens = workloads_of(of_users[user], HIDDEN_SIZE)
    home = np.repeat(np.arange(ranks), ROWS_PER_RANK)
    return UserMajorBatch(ranks, workloads, BYTES_PER_TOKEN * tokens, user, home, of_users - own, own)


def _figures(batch: UserMajorBatch, place: Place, tolerance: float) -> dict[str, float]:
    """Unique ids are relative to those as loaded, in the mean, and on the rank with most of each."""
    start = time.perf_counter()
    partition = place(batch, tolerance)
    milliseconds = (time.perf_counter() - start) * 1e3
    before = batch.unique_ids(np.split(np.arange(len(batch.user)), batch.ranks))
    after = batch.unique_ids(partition)
    bound = lower_bound(batch.workloads, batch.ranks)
    stayed = [samples[batch.home[samples] == rank] for rank, samples in enumerate(partition)]
    return {
        "unique_ids": after.mean() / before.mean(),
        "unique_ids_of_most": after.max() / before.max(),
        "unique_share_of_ids": after.sum() / (batch.ids + batch.own)[batch.user].sum(),
        "percent_above_bound": 100 * (imbalance(batch.workloads, partition) / bound - 1),
        "percent_of_bytes_moved": 100 * (1 - batch.sizes[np.concatenate(stayed)].sum() / batch.sizes.sum()),
        "ms": milliseconds,
    }
