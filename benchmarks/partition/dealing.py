"""How evenly, and with how many unique ids, a sampler deals a stream's global batches to ranks.

The stream has the shape of MLPerf Training's for HSTU on Yambda-5B. A window is a day, and in it users follow
one another, or are shuffled. A sample is a listen, with the user's events before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from benchmarks.harness import (
    Record,
    average,
    list_cases,
    machine,
    measure_cases,
    summarize,
    time_call,
)
from benchmarks.markdown import pivot
from commons.advisor.public_data import PUBLIC_DATA
from commons.partition import imbalance, loads, rebalance, refined
from commons.perf_model import HSTUFlops

# Published: a user's events in 300 days, users, and the shares of events that are listens, or in each pool.
YAMBDA, USERS, DAYS = PUBLIC_DATA["yambda-5b"], 1_000_000, 300
LISTENS, POOLS = 0.972, (0.613, 0.359, 0.019)
# The benchmark's settings: events of a history that are looked at, most of each pool, and other tokens.
SCANNED, MOST_OF_POOL, OTHER_TOKENS = 20_000, 1362, 9
MODEL = HSTUFlops(num_layers=3, hidden_size=512, num_heads=4, head_dim=128)
# The rows of its local script, and its smallest and largest global batch.
SIZES = ((8, 32), (8, 1024), (64, 512))
# Shares of a window within which samples are shuffled: its default, one that it recommends, and all.
SHUFFLED = {"none": 0.0, "in 3%": 0.03, "all": 1.0}
# Ours: nobody publishes how many users listen on a day, and this is past the middle of the 300.
ACTIVE, DAY = 0.4, 225
DRAWS = 30


@dataclass(frozen=True)
class Window:
    """The listens of a day, by user.

    Attributes:
        ends: int64 `[users]`, listens of each user and all before it.
        earlier: int64 `[users]`, events of each before the day.
    """

    ends: np.ndarray
    earlier: np.ndarray


@dataclass(frozen=True)
class Events:
    """A global batch of listens, in the order of the stream; all arrays are int64 `[samples]`.

    Attributes:
        ranks: number of ranks that share it.
        user: the user of each.
        ends: the user's events before each.
        lengths: those of them in the sample, the last ones.
    """

    ranks: int
    user: np.ndarray
    ends: np.ndarray
    lengths: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of each, int64 `[samples]`."""
        return self.lengths + OTHER_TOKENS

    @property
    def costs(self) -> np.ndarray:
        """FLOPs of each, int64 `[samples]`."""
        return MODEL.per_sample(self.tokens)

    def count_unique_ids(self, samples: np.ndarray) -> int:
        """Returns the different events in these samples, if no two events have the same item."""
        _, user = np.unique(self.user[samples], return_inverse=True)
        last, first = np.zeros(user.max() + 1, np.int64), np.full(user.max() + 1, YAMBDA.most)
        np.maximum.at(last, user, self.ends[samples])
        np.minimum.at(first, user, self.ends[samples] - self.lengths[samples])
        return int((last - first).sum())


def _round_robin(events: Events) -> np.ndarray:
    return np.arange(len(events.user)) % events.ranks


# Functions that return the indices of each rank's samples; `examples/stream_sampler.py` has the last.
DEALS: dict[str, Callable[[Events], list[np.ndarray]]] = {
    "round robin": lambda events: [
        np.flatnonzero(_round_robin(events) == rank) for rank in range(events.ranks)
    ],
    "contiguous": lambda events: np.split(np.arange(len(events.user)), events.ranks),
    "by cost": lambda events: refined(events.costs, events.ranks),
    "by cost and user": lambda events: rebalance(
        events.costs, _round_robin(events), events.ranks, groups=events.user
    ),
}


def measure() -> Record:
    """Returns a record for each size, order and way to deal: means over global batches."""
    sizes = [{"ranks": ranks, "rows": rows} for ranks, rows in SIZES]
    cases = [size | case for size in sizes for case in list_cases(shuffled=SHUFFLED, deal=DEALS)]
    return {"records": measure_cases(cases, _measure, "dealing"), "machine": machine()}


def _measure(ranks: int, rows: int, shuffled: str, deal: str) -> Record:
    """Returns means over global batches, and the median milliseconds of CPU time to deal one."""
    rng, figures, times = np.random.default_rng([ranks, rows]), [], []
    for _ in range(DRAWS + 1):
        events = _draw_batch(_draw_window(), ranks, rows, SHUFFLED[shuffled], rng)
        partition, ms = time_call(partial(DEALS[deal], events), time.process_time)
        figures.append(_assess(events, partition))
        times.append(ms)
    return average(figures[1:]) | {"ms": summarize(times[1:])}  # the first compiles


@cache
def _draw_window() -> Window:
    """Draws a day: users listen on it with the same probability, and in proportion to all their events."""
    rng = np.random.default_rng(0)
    scale = np.sqrt(2 * np.log(YAMBDA.mean / YAMBDA.median))
    events = rng.lognormal(np.log(YAMBDA.median), scale, USERS).clip(1, YAMBDA.most)
    events = events[rng.random(USERS) < ACTIVE]
    listens = rng.poisson(events * LISTENS / (ACTIVE * DAYS))
    return Window(np.cumsum(listens), np.rint(events * DAY / DAYS).astype(np.int64))


def _draw_batch(window: Window, ranks: int, rows: int, shuffled: float, rng: np.random.Generator) -> Events:
    """Draws consecutive listens of a window that is shuffled in segments of this share of it."""
    count, size = int(window.ends[-1]), ranks * rows
    segment = max(int(shuffled * count), size)
    listens = rng.integers(count - segment + 1) + rng.choice(segment, size, replace=False)
    if not shuffled:
        listens.sort()
    user = np.searchsorted(window.ends, listens, "right")
    ends = window.earlier[user] + listens - np.append(0, window.ends)[user]
    scanned = np.minimum(ends, SCANNED)
    pools = [np.minimum(np.rint(share * scanned).astype(np.int64), MOST_OF_POOL) for share in POOLS]
    return Events(ranks, user, ends, np.minimum(sum(pools), ends))


def _assess(events: Events, partition: list[np.ndarray]) -> dict[str, float]:
    tokens = loads(events.tokens, partition)
    return {
        "imbalance": imbalance(events.costs, partition),
        "tokens": tokens.max() / tokens.mean(),
        "unique_ids": float(np.mean([events.count_unique_ids(samples) for samples in partition])),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker, with a column for each way to deal: balance and ids; time."""
    size = {"ranks × rows": "{ranks} × {rows:,}", "shuffled": "{shuffled}"}
    shown = [record | {"thousands": record["unique_ids"] / 1000} for record in figures["records"]]
    cell = "{imbalance:.3f} / {tokens:.3f} / {thousands:,.0f}k"
    timed = [record for record in shown if record["deal"].startswith("by cost")]
    return {
        "dealing balance": pivot(shown, size, "{deal}", cell),
        "dealing time": pivot(timed, size, "{deal}", "{ms[median]:.1f}"),
    }
