"""Samples of one user share ids: how many ids ranks look up, and what keeping users together costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import Record, cases, means, measured, timed
from benchmarks.markdown import pivot, table
from benchmarks.partition.lengths import LOGNORMAL, Lengths, lognormal
from benchmarks.partition.placements import BYTES_PER_TOKEN, ROWS_PER_RANK, workloads_of
from commons.partition import imbalance, karmarkar_karp, lower_bound, rebalance, refined

LENGTHS: dict[str, Lengths] = {"20 to 200": lambda rng, n: rng.integers(20, 201, n), LOGNORMAL: lognormal}
SAMPLES_PER_USER, RANKS, HIDDEN_SIZE = (4, 16), (8, 64), 128
SHARED = 0.9  # of a sample's ids, with all other samples of its user
TOLERANCES, DEFAULT_TOLERANCE = (0.005, 0.01, 0.02, 0.05, 0.1), 0.01


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


def measure_groups(draws: int) -> list[Record]:
    """A record for each lengths, samples per user, ranks, placement and tolerance."""
    streams: dict[str, Any] = {"lengths": LENGTHS, "samples_per_user": SAMPLES_PER_USER, "ranks": RANKS}
    of_all = [
        case
        for case in cases(**streams, draws=[draws], placement=PLACEMENTS, tolerance=(None, *TOLERANCES))
        if (case["placement"] in WITH_TOLERANCE) == (case["tolerance"] is not None)
    ]
    return measured(of_all, _measure, "groups")


def _measure(
    lengths: str, samples_per_user: int, ranks: int, draws: int, placement: str, tolerance: float | None
) -> Record:
    rng = np.random.default_rng([0, ranks])
    batches = [draw_users(LENGTHS[lengths], samples_per_user, ranks, rng) for _ in range(draws)]
    figures = [_figures(batch, PLACEMENTS[placement], tolerance or 0.0) for batch in batches]
    return means(figures, 4) | {"ms": round(float(np.median([of["ms"] for of in figures])), 4)}


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
    partition, taken = timed(partial(place, batch, tolerance))
    before = batch.unique_ids(np.split(np.arange(len(batch.user)), batch.ranks))
    after = batch.unique_ids(partition)
    bound = lower_bound(batch.workloads, batch.ranks)
    stayed = [samples[batch.home[samples] == rank] for rank, samples in enumerate(partition)]
    return {
        "unique_ids": after.mean() / before.mean(),
        "unique_ids_of_most": after.max() / before.max(),
        "percent_above_bound": 100 * (imbalance(batch.workloads, partition) / bound - 1),
        "percent_of_bytes_moved": 100 * (1 - batch.sizes[np.concatenate(stayed)].sum() / batch.sizes.sum()),
        "ms": taken,
    }


def groups_table(groups: list[Record]) -> str:
    """Returns Markdown: placements at their default tolerances."""
    columns = {
        "lengths": "{lengths}",
        "samples per user": "{samples_per_user}",
        "ranks": "{ranks}",
        "placement": "{placement}",
        "unique ids": "{unique_ids:.2f}",
        "on the rank with most": "{unique_ids_of_most:.2f}",
        "above the bound": "{percent_above_bound:.2f}%",
        "bytes moved": "{percent_of_bytes_moved:.0f}%",
        "ms": "{ms:.2f}",
    }
    return table([record for record in groups if record["tolerance"] in (None, DEFAULT_TOLERANCE)], columns)


def tolerances_table(groups: list[Record]) -> str:
    """Returns Markdown: mean unique ids with many samples per user, by tolerance."""
    most = max(record["samples_per_user"] for record in groups)
    records = [each for each in groups if each["tolerance"] is not None and each["samples_per_user"] == most]
    rows = {"lengths": "{lengths}", "ranks": "{ranks}", "placement": "{placement}"}
    return pivot(records, rows, "{tolerance:.1%}", "{unique_ids:.2f}")
