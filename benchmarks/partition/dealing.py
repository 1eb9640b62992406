"""Measures the ranks' balance and unique ids when a sampler deals them a stream's global batches.

The stream resembles that of MLPerf Training for HSTU on Yambda-5B. A sample is one listen, with the user's
earlier events. A window is one day, in which users follow one another or samples are shuffled.
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
from commons.extensions.sample_groups import rebalance_groups
from commons.partition import imbalance, loads, refined
from commons.perf_model import HSTUFlops

# Published: events per user in 300 days, number of users, and shares of events that are listens or in a pool.
YAMBDA, USERS, DAYS = PUBLIC_DATA["yambda-5b"], 1_000_000, 300
LISTENS, POOLS = 0.972, (0.613, 0.359, 0.019)
# MLPerf's settings: scanned events of a history, largest number of events per pool, and other tokens.
SCANNED, MOST_OF_POOL, OTHER_TOKENS = 20_000, 1362, 9
MODEL = HSTUFlops(num_layers=3, hidden_size=512, num_heads=4, head_dim=128)
# (ranks, rows) of MLPerf's local script, and of its smallest and its largest global batch.
SIZES = ((8, 32), (8, 1024), (64, 512))
# Share of a window within which samples are shuffled: MLPerf's default, its recommendation, and all.
SHUFFLED = {"none": 0.0, "in 3%": 0.03, "all": 1.0}
# Assumed, as nobody publishes it: the share of users active on a day. The day is past the middle of the 300.
ACTIVE, DAY = 0.4, 225
DRAWS = 30


@dataclass(frozen=True)
class Window:
    """The listens of a day, by user.

    Attributes:
        ends: number of listens up to and including each user, int64 `[users]`.
        earlier: number of each user's events before the day, int64 `[users]`.
    """

    ends: np.ndarray
    earlier: np.ndarray


@dataclass(frozen=True)
class Events:
    """A global batch of listens, in the order of the stream. All arrays are int64 `[samples]`.

    Attributes:
        ranks: number of ranks that share the batch.
        user: user of each sample.
        ends: number of the user's events before each listen.
        lengths: number of events in each sample, the latest of the user's earlier events.
    """

    ranks: int
    user: np.ndarray
    ends: np.ndarray
    lengths: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of each sample, int64 `[samples]`."""
        return self.lengths + OTHER_TOKENS

    @property
    def costs(self) -> np.ndarray:
        """FLOPs of each sample, int64 `[samples]`."""
        return MODEL.per_sample(self.tokens)

    def count_unique_ids(self, samples: np.ndarray) -> int:
        """Returns the number of distinct events in these samples, as if every event had its own item."""
        _, user = np.unique(self.user[samples], return_inverse=True)
        last, first = np.zeros(user.max() + 1, np.int64), np.full(user.max() + 1, YAMBDA.most)
        np.maximum.at(last, user, self.ends[samples])
        np.minimum.at(first, user, self.ends[samples] - self.lengths[samples])
        return int((last - first).sum())


def _round_robin(events: Events) -> np.ndarray:
    return np.arange(len(events.user)) % events.ranks


# Functions that return each rank's sample indices. `examples/stream_sampler.py` uses the last function.
DEALS: dict[str, Callable[[Events], list[np.ndarray]]] = {
    "round robin": lambda events: [
        np.flatnonzero(_round_robin(events) == rank) for rank in range(events.ranks)
    ],
    "contiguous": lambda events: np.split(np.arange(len(events.user)), events.ranks),
    "by cost": lambda events: refined(events.costs, events.ranks),
    "by cost and user": lambda events: rebalance_groups(
        events.costs, _round_robin(events), events.ranks, groups=events.user
    ),
}


def measure() -> Record:
    """Returns means over global batches, one record per combination of size, order, and way to deal."""
    sizes = [{"ranks": ranks, "rows": rows} for ranks, rows in SIZES]
    cases = [size | case for size in sizes for case in list_cases(shuffled=SHUFFLED, deal=DEALS)]
    return {"records": measure_cases(cases, _measure, "dealing"), "machine": machine()}


def _measure(ranks: int, rows: int, shuffled: str, deal: str) -> Record:
    """Returns means over global batches, and the milliseconds of CPU time to deal one."""
    rng, figures, times = np.random.default_rng([ranks, rows]), [], []
    for _ in range(DRAWS + 1):
        events = _draw_batch(_draw_window(), ranks, rows, SHUFFLED[shuffled], rng)
        partition, ms = time_call(partial(DEALS[deal], events), time.process_time)
        figures.append(_assess(events, partition))
        times.append(ms)
    return average(figures[1:]) | {"ms": summarize(times[1:])}  # the first call compiles


@cache
def _draw_window() -> Window:
    """Returns a random day. All users are equally likely to be active, and listen in proportion to events."""
    rng = np.random.default_rng(0)
    scale = np.sqrt(2 * np.log(YAMBDA.mean / YAMBDA.median))
    events = rng.lognormal(np.log(YAMBDA.median), scale, USERS).clip(1, YAMBDA.most)
    events = events[rng.random(USERS) < ACTIVE]
    listens = rng.poisson(events * LISTENS / (ACTIVE * DAYS))
    return Window(np.cumsum(listens), np.rint(events * DAY / DAYS).astype(np.int64))


def _draw_batch(window: Window, ranks: int, rows: int, shuffled: float, rng: np.random.Generator) -> Events:
    """Returns a random global batch from a window shuffled in segments. `shuffled` is a segment's share."""
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
    """Returns the Markdown for each marker, with a column for each way to deal."""
    size = {"ranks × rows": "{ranks} × {rows:,}", "shuffled": "{shuffled}"}
    shown = [record | {"thousands": record["unique_ids"] / 1000} for record in figures["records"]]
    cell = "{imbalance:.3f} / {tokens:.3f} / {thousands:,.0f}k"
    timed = [record for record in shown if record["deal"].startswith("by cost")]
    return {
        "dealing balance": pivot(shown, size, "{deal}", cell),
        "dealing time": pivot(timed, size, "{deal}", "{ms[median]:.1f}"),
    }
