"""Compares the tokens of the fullest rank with and without a token tolerance, for random histories."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.harness import Record, average, list_cases, machine, measure_cases, time_call
from benchmarks.markdown import make_table
from benchmarks.partition.lengths import KUAIRAND, LOGNORMAL, YAMBDA, ZIPF, list_lengths
from benchmarks.partition.placements import PLACEMENTS, GlobalBatch, draw_batches
from commons.distributed import ShufflerSettings
from commons.partition import imbalance
from commons.partition.problem import number_of_part

TOLERANCE = ShufflerSettings.token_tolerance
# Taobao's and uniform histories are left out, because their tokens are within the tolerance anyway.
LENGTHS, HIDDEN_SIZE, RANKS = (YAMBDA, KUAIRAND, LOGNORMAL, ZIPF), 256, (8, 64, 1024)
DRAWS, FEWER_DRAWS, TIMED_CALLS = 20, 5, 5
Place = Callable[[GlobalBatch], list[np.ndarray]]
WITHOUT: Place = PLACEMENTS["rebalance"]


def place_with_tolerance(batch: GlobalBatch) -> list[np.ndarray]:
    """Returns each rank's sample indices, placed within the token tolerance."""
    return batch.rebalance(tokens=batch.tokens, token_tolerance=TOLERANCE)


def measure() -> Record:
    """Returns records of computed placements."""
    cases = list_cases(lengths=LENGTHS, hidden_size=[HIDDEN_SIZE], ranks=RANKS)
    return {
        "placements": measure_cases(cases, _compare, "placements"),
        "machine": machine(),
    }


def _compare(lengths: str, hidden_size: int, ranks: int) -> Record:
    """Returns the mean figures of `rebalance` without and with the tolerance."""
    draws = DRAWS if ranks < 1000 else FEWER_DRAWS
    batches = draw_batches(list_lengths(None)[lengths], hidden_size, ranks, draws)
    arms = {"without": WITHOUT, "with": place_with_tolerance}
    return {name: average([_assess(batch, place) for batch in batches]) for name, place in arms.items()}


def _assess(batch: GlobalBatch, place: Place) -> dict[str, float]:
    """Returns the imbalance of loads and of tokens, the percentage of samples moved, and CPU milliseconds."""
    calls = [time_call(partial(place, batch), time.process_time) for _ in range(TIMED_CALLS)]
    partition = calls[0][0]
    moved = number_of_part(partition, len(batch.home)) != batch.home
    return {
        "load": imbalance(batch.workloads, partition),
        "tokens": imbalance(batch.tokens, partition),
        "percent_moved": 100 * float(moved.mean()),
        "ms": min(taken for _, taken in calls),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    placements = {
        "lengths": "{lengths}",
        "ranks": "{ranks}",
        "fullest ÷ mean tokens": "{without[tokens]:.3f} → {with[tokens]:.3f}",
        "samples moved": "{without[percent_moved]:.1f}% → {with[percent_moved]:.1f}%",
        "ms": "{without[ms]:.2f} → {with[ms]:.2f}",
    }
    shown = [
        record
        for record in figures["placements"]
        if record["lengths"] in LENGTHS and record["hidden_size"] == HIDDEN_SIZE
    ]
    return {"token-tolerance placements": make_table(shown, placements)}
