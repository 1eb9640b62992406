"""Measures how many ids ranks look up, and how many bytes move, if samples of the same user share ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Record, average, list_cases, measure_cases
from benchmarks.markdown import pivot
from benchmarks.partition.lengths import LOGNORMAL, Lengths, draw_lognormal
from benchmarks.partition.placements import (
    BYTES_PER_TOKEN,
    PLACEMENTS,
    ROWS_PER_RANK,
    GlobalBatch,
    compute_workloads,
)
from commons.extensions.sample_groups import rebalance_groups

LENGTHS: dict[str, Lengths] = {
    "20 to 200": lambda rng, n: rng.integers(20, 201, n),
    LOGNORMAL: draw_lognormal,
}
SAMPLES_PER_USER, RANKS, HIDDEN_SIZE = (4, 16), (8, 64), 128
SHARED = 0.9  # share of a sample's ids that all samples of its user contain


@dataclass(frozen=True)
class UserMajorBatch(GlobalBatch):
    """The samples of one step, in which each user's samples follow one another.

    Attributes:
        user: user of each sample, int64 `[samples]`.
        shared: number of ids that all samples of a user contain, int64 `[users]`.
        own: number of ids per sample that no other sample contains, int64 `[users]`.
    """

    user: np.ndarray
    shared: np.ndarray
    own: np.ndarray

    def count_unique_ids(self, partition: list[np.ndarray]) -> np.ndarray:
        """Returns the number of distinct ids on each rank, int64 `[ranks]`."""
        users = [self.user[samples] for samples in partition]
        return np.array([self.own[each].sum() + self.shared[np.unique(each)].sum() for each in users])


Place = Callable[[UserMajorBatch], list[np.ndarray]]
USERS_TOGETHER: dict[str, Place] = {
    "refined": PLACEMENTS["refined"],
    "rebalance": PLACEMENTS["rebalance"],
    "rebalance, groups": lambda batch: rebalance_groups(
        batch.workloads, batch.home, batch.ranks, sizes=batch.sizes, groups=batch.user
    ),
}


def measure_groups(draws: int) -> list[Record]:
    """Returns means over draws, one record per lengths, samples per user, ranks, and placement."""

    def measure(lengths: str, samples_per_user: int, ranks: int, placement: str) -> Record:
        rng = np.random.default_rng([0, ranks])
        batches = [_draw_users(LENGTHS[lengths], samples_per_user, ranks, rng) for _ in range(draws)]
        return average([_assess(batch, USERS_TOGETHER[placement](batch)) for batch in batches], 4)

    streams = {"lengths": LENGTHS, "samples_per_user": SAMPLES_PER_USER, "ranks": RANKS}
    return measure_cases(list_cases(**streams, placement=USERS_TOGETHER), measure, "groups")


def _draw_users(lengths: Lengths, per_user: int, ranks: int, rng: np.random.Generator) -> UserMajorBatch:
    """Returns a random batch in which each user's samples are equally long."""
    items = lengths(rng, ROWS_PER_RANK * ranks // per_user).astype(np.int64)
    own = np.rint((1 - SHARED) * items).astype(np.int64)
    user = np.repeat(np.arange(len(items)), per_user)
    workloads, tokens = compute_workloads(items[user], HIDDEN_SIZE)
    home = np.repeat(np.arange(ranks), ROWS_PER_RANK)
    return UserMajorBatch(ranks, workloads, tokens, BYTES_PER_TOKEN * tokens, home, user, items - own, own)


def _assess(batch: UserMajorBatch, partition: list[np.ndarray]) -> dict[str, float]:
    """Returns unique ids ÷ unique ids as loaded, of the mean rank and of the fullest, and bytes moved."""
    before, after = map(batch.count_unique_ids, (PLACEMENTS["as loaded"](batch), partition))
    stayed = [samples[batch.home[samples] == rank] for rank, samples in enumerate(partition)]
    return {
        "unique_ids": after.mean() / before.mean(),
        "unique_ids_of_most": after.max() / before.max(),
        "percent_of_bytes_moved": 100 * (1 - batch.sizes[np.concatenate(stayed)].sum() / batch.sizes.sum()),
    }


def tabulate_groups(groups: list[Record]) -> str:
    """Returns a table with a column for each placement."""
    rows = {"lengths": "{lengths}", "samples per user": "{samples_per_user}", "ranks": "{ranks}"}
    cell = "{unique_ids:.2f} / {unique_ids_of_most:.2f} / {percent_of_bytes_moved:.0f}%"
    return pivot(groups, rows, "{placement}", cell)
