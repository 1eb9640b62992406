"""Measures the lookups, the balance, and the time of planning if samples of the same user belong together.

`partition` shows the ids that ranks look up, and `groups` ranks per user on up to 512 ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.harness import Record, average, list_cases, measure_cases, time_call
from benchmarks.markdown import pivot
from benchmarks.partition.placements import (
    BYTES_PER_TOKEN,
    LOGNORMAL,
    PLACEMENTS,
    ROWS_PER_RANK,
    GlobalBatch,
    draw_lognormal,
    make_flops,
)
from commons.extensions.sample_groups import rebalance_groups
from commons.partition import imbalance, lower_bound
from commons.partition.problem import number_of_part

HIDDEN_SIZE = 128
LENGTHS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "20 to 200": lambda rng, n: rng.integers(20, 201, n),
    LOGNORMAL: draw_lognormal,
}
# Streams in which users have equally many samples, which share part of their ids.
SAMPLES_PER_USER, RANKS = (4, 16), (8, 64)
SHARED = 0.9  # share of a sample's ids that all samples of its user contain
# Streams of other sizes, whose samples of a user have the same ids.
SIZES = ((8, 32), (64, 32), (8, 512), (512, 32), (32, 1024))
USERS, ORDERS = ("4 each", "16 each", "Zipf", "half in fours"), ("dealt", "user-major")
MANY_SAMPLES, DRAWS = 4096, 3


@dataclass(frozen=True)
class Stream(GlobalBatch):
    """The samples of one step. A user's samples are equally long.

    Attributes:
        user: user of each sample, int64 `[samples]`.
        shared: number of ids that all samples of a user contain, int64 `[users]`.
        own: number of ids per sample that no other sample contains, int64 `[users]`.
    """

    user: np.ndarray
    shared: np.ndarray
    own: np.ndarray

    def figures(self, partition: list[np.ndarray]) -> dict[str, float]:
        """Returns ranks per user, unique ids ÷ those as loaded (of all, of the fullest rank), and moves."""
        rank_of = number_of_part(partition, len(self.home))
        _, before = self._count_lookups(self.home)
        users, after = self._count_lookups(rank_of)
        moved = rank_of != self.home
        return {
            "ranks_per_user": users / len(self.shared),
            "unique_ids": after.sum() / before.sum(),
            "unique_ids_of_most": after.max() / before.max(),
            "moved": float(moved.mean()),
            "percent_of_bytes_moved": 100 * self.sizes[moved].sum() / self.sizes.sum(),
        }

    def _count_lookups(self, rank_of: np.ndarray) -> tuple[int, np.ndarray]:
        """Returns the number of (rank, user) pairs, and each rank's number of distinct ids."""
        pairs = np.unique(rank_of * len(self.shared) + self.user)
        ranks, users = np.divmod(pairs, len(self.shared))
        ids = np.bincount(ranks, self.shared[users], self.ranks)
        return len(pairs), ids + np.bincount(rank_of, self.own[self.user], self.ranks)


PLACES: dict[str, Callable[[Stream], list[np.ndarray]]] = {
    "refined": PLACEMENTS["refined"],
    "rebalance": PLACEMENTS["rebalance"],
    "rebalance, groups": lambda stream: _rebalance_groups(stream, equal_rows=True),
}


def _count_flops_of_all_pairs(tokens: np.ndarray) -> np.ndarray:
    return 10 * tokens * HIDDEN_SIZE**2 + 4 * tokens**2 * HIDDEN_SIZE


def draw(
    ranks: int,
    rows: int,
    users: str,
    lengths: str,
    order: str,
    seed: int,
    shared: float = 1.0,
    count_flops: Callable[[np.ndarray], np.ndarray] = _count_flops_of_all_pairs,
) -> Stream:
    """Returns a random stream. A user's samples follow one another, or are dealt to the ranks in turn.

    Args:
        ranks, rows: number of ranks, and of rows per rank.
        users: number of samples per user, one of `USERS` or "N each".
        lengths: a key of `LENGTHS`, or the length of all samples.
        order: one of `ORDERS`.
        seed: seed of the generator.
        shared: share of a sample's ids that all samples of its user contain.
        count_flops: function that returns the workloads of samples with these tokens.
    """
    rng, count = np.random.default_rng([seed, ranks, rows]), ranks * rows
    samples_of = _draw_sample_counts(users, count, rng)
    draw_lengths = LENGTHS.get(lengths, lambda _, n: np.full(n, int(lengths)))
    length = draw_lengths(rng, len(samples_of))
    user = np.repeat(np.arange(len(samples_of)), samples_of)
    tokens = 2 * length[user] + 1
    home = np.arange(count) // rows if order == "user-major" else np.arange(count) % ranks
    own = np.rint((1 - shared) * length).astype(np.int64)
    sizes = BYTES_PER_TOKEN * tokens
    return Stream(ranks, count_flops(tokens), tokens, sizes, home, user, length - own, own)


def _draw_sample_counts(users: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the number of samples of each user, int64 `[users]`. They sum to `count`."""
    if users == "half in fours":
        fours = count // 8
        samples_of = np.repeat([4, 1], [fours, count - 4 * fours])
        rng.shuffle(samples_of)
    elif users == "Zipf":
        share = 1 / np.arange(1, count // 4 + 1)
        samples_of = rng.multinomial(count, share / share.sum())
        samples_of = samples_of[samples_of > 0]
        rng.shuffle(samples_of)
    else:
        each = int(users.removesuffix(" each"))
        samples_of = np.full(-(-count // each), each)
    samples_of = np.diff(np.minimum(np.cumsum(samples_of), count), prepend=0)
    return samples_of[samples_of > 0]


def _rebalance_groups(stream: Stream, equal_rows: bool) -> list[np.ndarray]:
    return rebalance_groups(
        stream.workloads,
        stream.home,
        stream.ranks,
        sizes=stream.sizes,
        groups=stream.user,
        equal_size=equal_rows,
    )


def measure_groups(draws: int) -> list[Record]:
    """Returns means over draws, one record per lengths, samples per user, ranks, and placement."""

    def measure(lengths: str, samples_per_user: int, ranks: int, placement: str) -> Record:
        stream = ranks, ROWS_PER_RANK, f"{samples_per_user} each", lengths, "user-major"
        streams = [draw(*stream, seed, SHARED, flops) for seed in range(draws)]
        return average([stream.figures(PLACES[placement](stream)) for stream in streams], 4)

    flops = make_flops(HIDDEN_SIZE).per_sample
    cases = list_cases(lengths=LENGTHS, samples_per_user=SAMPLES_PER_USER, ranks=RANKS, placement=PLACES)
    return measure_cases(cases, measure, "groups")


def tabulate_groups(groups: list[Record]) -> str:
    """Returns a table with a column for each placement."""
    rows = {"lengths": "{lengths}", "samples per user": "{samples_per_user}", "ranks": "{ranks}"}
    cell = "{unique_ids:.2f} / {unique_ids_of_most:.2f} / {percent_of_bytes_moved:.0f}%"
    return pivot(groups, rows, "{placement}", cell)


def measure() -> Record:
    """Returns a record for each case of the sizes."""
    cases = [
        {"ranks": ranks, "rows": rows, **case}
        for ranks, rows in SIZES
        for case in list_cases(users=USERS, lengths=LENGTHS, order=ORDERS, equal_rows=(True, False))
    ]
    for equal_rows in (True, False):  # compiles
        _measure(4, 8, "4 each", LOGNORMAL, "dealt", equal_rows)
    return {"now": measure_cases(cases, _measure, "cases")}


def _measure(ranks: int, rows: int, users: str, lengths: str, order: str, equal_rows: bool) -> Record:
    """Returns means over draws. `ms` is the CPU time of the faster of two calls."""
    figures = []
    for seed in range(DRAWS if ranks * rows < MANY_SAMPLES else 1):
        stream = draw(ranks, rows, users, lengths, order, seed)
        place = partial(_rebalance_groups, stream, equal_rows)
        (partition, first), (_, second) = (time_call(place, time.process_time) for _ in range(2))
        load = imbalance(stream.workloads, partition) / lower_bound(stream.workloads, ranks, equal_rows)
        figures.append(stream.figures(partition) | {"load_to_bound": load, "ms": min(first, second)})
    return average(figures)


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker: the worst streams at each size."""
    worst: dict[tuple[str, str], Record] = {}
    for record in figures["now"]:
        size = f"{record['ranks']} × {record['rows']:,}"
        so_far = worst.setdefault((size, record["users"]), {"ranks_per_user": 0.0, "ms": 0.0})
        so_far |= {name: max(so_far[name], record[name]) for name in so_far}
    at_size = [{"size": size, "users": users} | record for (size, users), record in worst.items()]
    cell = "{ranks_per_user:.2f} / {ms:.0f} ms"
    return {"groups at size": pivot(at_size, {"ranks × rows": "{size}"}, "{users}", cell)}
