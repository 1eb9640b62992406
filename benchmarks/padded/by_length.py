"""Loads samples of like lengths together, in place of an exchange, and computes what that leaves to pad."""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks.harness import Record, list_cases, measure_cases
from benchmarks.padded.lengths import KINDS
from benchmarks.padded.plans import RANKS, count_flops, tabulate_ranks
from benchmarks.partition.placements import ROWS_PER_RANK
from commons.datasets import BucketSampler

BUCKETS, STEPS, EPOCHS = 16, 64, 3

# The numbers of each rank's samples, int64 `[rows]`, for each step.
Steps = list[list[np.ndarray]]


def load_by_length(workloads: np.ndarray, ranks: int) -> Steps:
    """Returns an epoch in steps of like workloads, int64 `[samples]`, which are divided among ranks."""
    samplers = [
        BucketSampler(workloads, ROWS_PER_RANK, rank, ranks, BUCKETS, last="keep") for rank in range(ranks)
    ]
    return [[np.array(batch) for batch in step] for step in zip(*samplers, strict=True)]


def measure_loading(epochs: int = EPOCHS) -> list[Record]:
    """Returns a record for each kind of lengths and number of ranks."""
    return measure_cases(list_cases(lengths=KINDS, ranks=RANKS), partial(_average, epochs), "by length")


def _average(epochs: int, lengths: str, ranks: int) -> Record:
    figures = []
    for epoch in range(epochs):
        drawn = KINDS[lengths](np.random.default_rng([epoch, ranks]), STEPS * ranks * ROWS_PER_RANK)
        costs = count_flops(drawn)
        figures.append(assess(costs, load_by_length(costs, ranks)))
    imbalance, largest = np.mean(figures, 0).round(4).tolist()
    return {"imbalance": imbalance, "largest_step": largest}


def assess(costs: np.ndarray, steps: Steps) -> tuple[float, float]:
    """Returns the largest padded costs of all steps ÷ what equal ranks would take without padding, and the
    largest work of a step ÷ the mean."""
    times = [max(len(part) * costs[part].max(initial=0) for part in step) for step in steps]
    work = [costs[np.concatenate(step)].sum() for step in steps]
    return sum(times) * len(steps[0]) / sum(work), max(work) / np.mean(work)


def tabulate_loading(records: list[Record]) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    columns = {"imbalance": "{imbalance:.2f}", "work of the largest step ÷ mean": "{largest_step:.2f}"}
    return {"padded loading": tabulate_ranks(records, columns)}
