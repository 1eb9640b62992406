"""Measures the gain of planning several steps together when a giant sample holds up a single step."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from benchmarks.harness import Record, list_cases, measure_cases, time_call
from benchmarks.markdown import pivot
from benchmarks.partition.lengths import draw_lognormal
from benchmarks.partition.placements import ROWS_PER_RANK, compute_workloads
from commons.extensions.controller import balance_window, step_ratios
from commons.partition import loads

RANKS, HIDDEN_SIZE = (8, 64), 128
NUM_STEPS = (1, 2, 4, 8)
STEP_RATIOS = (None, 1.25, 1.5)


def measure_windows(draws: int) -> list[Record]:
    """Returns a record for each number of ranks, number of steps, and limit.

    Each draw fills the longest window, so that windows of all lengths plan the same samples.
    """
    cases = list_cases(ranks=RANKS, num_steps=NUM_STEPS, max_step_ratio=STEP_RATIOS)
    # A limit cannot affect a single step, which is its own mean step.
    limited = [case for case in cases if case["num_steps"] > 1 or case["max_step_ratio"] is None]
    return measure_cases(limited, partial(_measure, draws), "windows")


def _measure(draws: int, ranks: int, num_steps: int, max_step_ratio: float | None) -> Record:
    rng = np.random.default_rng([0, ranks])
    over_ideal, largest_ratios, times = [], [], []
    for _ in range(draws):
        lengths = draw_lognormal(rng, ROWS_PER_RANK * ranks * max(NUM_STEPS))
        workloads = compute_workloads(lengths, HIDDEN_SIZE)[0]
        sum_of_largest = 0.0
        for part in np.split(workloads, max(NUM_STEPS) // num_steps):
            call = partial(balance_window, part, ranks, num_steps, max_step_ratio)
            window, taken = time_call(call, time.process_time)
            times.append(taken)
            sum_of_largest += sum(loads(part, step).max() for step in window)
            largest_ratios.append(step_ratios(part, window).max())
        over_ideal.append(sum_of_largest / (workloads.sum() / ranks))
    return {
        "largest_loads_over_ideal": round(float(np.mean(over_ideal)), 6),
        "largest_step_ratio": {"mean": round(float(np.mean(largest_ratios)), 4)},
        "ms_median": round(float(np.median(times)), 4),
    }


def tabulate_windows(windows: list[Record]) -> str:
    """Returns a table with a column for each limit."""
    return pivot(
        [record for record in windows if record["max_step_ratio"] in STEP_RATIOS],
        {"ranks": "{ranks}", "steps": "{num_steps}"},
        lambda record: f"limit {record['max_step_ratio']}".replace("limit None", "no limit"),
        "{largest_loads_over_ideal:.3f} ({largest_step_ratio[mean]:.2f}), {ms_median:.1f} ms",
    )
