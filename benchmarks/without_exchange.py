"""Compares the computed loads of ways to balance ranks, with and without an exchange, on public lengths."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Record, list_cases, measure_cases
from benchmarks.markdown import pivot
from benchmarks.partition.pieces import load_samples, place_pieces
from benchmarks.partition.placements import ROWS_PER_RANK, compute_workloads
from commons.advisor.public_data import PUBLIC_DATA
from commons.datasets import BucketSampler
from commons.partition import loads, rebalance

RANKS, STEPS = 64, 128
# Title: (data set, number of newest events that a trainer keeps, width of a layer). None keeps all events.
LENGTHS: dict[str, tuple[str, int | None, int]] = {
    "MovieLens 20M, newest 200": ("ml-20m", 200, 128),
    "Yambda-5B, newest 4,086": ("yambda-5b", 4086, 1024),
    "KuaiRand-27K, uncapped": ("kuairand-27k", None, 1024),
}
EXAMPLE = Path(__file__).parents[1] / "examples" / "budget_batches.py"

# One pair per step: each rank's load, and its number of samples or pieces.
Steps = list[tuple[np.ndarray, np.ndarray]]


def _as_loaded(items: np.ndarray, width: int) -> Steps:
    costs, _ = compute_workloads(items, width)
    return [_step(costs, parts) for parts in np.arange(len(items)).reshape(STEPS, RANKS, -1)]


def _exchange(items: np.ndarray, width: int) -> Steps:
    costs, _ = compute_workloads(items, width)
    home = np.repeat(np.arange(RANKS), ROWS_PER_RANK)
    return [
        _step(costs, [part[rank_rows] for rank_rows in rebalance(costs[part], home, RANKS)])
        for part in np.arange(len(items)).reshape(STEPS, -1)
    ]


def _pieces(items: np.ndarray, width: int) -> Steps:
    plans = [place_pieces(*load_samples(part, width, RANKS)) for part in items.reshape(STEPS, -1)]
    return [(plan.loads, np.bincount(plan.destination, minlength=RANKS)) for plan in plans]


def _by_length(items: np.ndarray, width: int) -> Steps:
    costs, _ = compute_workloads(items, width)
    samplers = [BucketSampler(costs, ROWS_PER_RANK, rank, RANKS, num_buckets=8) for rank in range(RANKS)]
    return [_step(costs, parts) for parts in zip(*samplers, strict=True)]


def _budget(pool: int, items: np.ndarray, width: int) -> Steps:
    """Lets the example fill batches to the mean cost, with at most four times the mean tokens and rows."""
    costs, tokens = compute_workloads(items, width)
    rows = ROWS_PER_RANK
    caps = (max(int(4 * rows * tokens.mean()), int(tokens.max())), 4 * rows)
    budget = int(rows * costs.mean())
    sampler = _example().BudgetSampler
    of_ranks = [sampler(costs, tokens, pool, budget, *caps, rank, RANKS) for rank in range(RANKS)]
    return [_step(costs, parts) for parts in zip_longest(*of_ranks, fillvalue=[])]


WAYS: dict[str, Callable[[np.ndarray, int], Steps]] = {
    "as loaded": _as_loaded,
    "exchange, or dealing": _exchange,
    "exchange of pieces": _pieces,
    "loading by length, 8 buckets": _by_length,
    **{
        f"budget, pool of {pool:,}": lambda items, width, pool=pool: _budget(pool, items, width)
        for pool in (64, 512)
    },
}


def _example() -> Any:
    """Returns the example as a module. It imports `commons` in place of the installed package."""
    module = types.ModuleType("budget_batches")
    text = EXAMPLE.read_text().replace("workload_balancer", "commons")
    exec(compile(text, str(EXAMPLE), "exec"), module.__dict__)
    return module


def _step(costs: np.ndarray, parts: Any) -> tuple[np.ndarray, np.ndarray]:
    places = [np.asarray(part, dtype=np.int64) for part in parts]
    return loads(costs, places), np.array([len(part) for part in places])


def measure() -> Record:
    """Returns one record for each way and set of lengths, over one epoch."""
    return {"records": measure_cases(list_cases(way=WAYS, lengths=LENGTHS), _measure, "ways")}


def _measure(way: str, lengths: str) -> Record:
    name, newest, width = LENGTHS[lengths]
    items = PUBLIC_DATA[name].draw(np.random.default_rng(0), STEPS * RANKS * ROWS_PER_RANK).clip(max=newest)
    return assess(WAYS[way](items, width))


def assess(steps: Steps) -> Record:
    """Returns the figures of an epoch. A rank that runs out of samples waits for the others.

    `imbalance` is the sum of all steps' largest loads ÷ the sum of their mean loads. The other figures cover
    only the steps in which every rank has samples. `before_the_end` is the imbalance of these steps, and
    `largest_step` their largest total load ÷ the mean. `fewest` and `most` are samples per rank and step.
    """
    whole = [step for step in steps if step[1].all()]

    def imbalance(some: Steps) -> float:
        largest, mean = (sum(float(of(step)) for step, _ in some) for of in (np.max, np.mean))
        return round(largest / mean, 4)

    totals = [float(each.sum()) for each, _ in whole]
    return {
        "imbalance": imbalance(steps),
        "before_the_end": imbalance(whole),
        "largest_step": round(max(totals) / np.mean(totals).item(), 4),
        "fewest": min(int(rows.min()) for _, rows in whole),
        "most": max(int(rows.max()) for _, rows in whole),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker, with a column for each data set."""
    cell = "{before_the_end:.3f} / {imbalance:.3f} / {largest_step:.2f} / {fewest}–{most}"
    return {"ways to balance": pivot(figures["records"], {"": "{way}"}, "{lengths}", cell)}
