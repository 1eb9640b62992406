"""Windows: what planning several steps together gains where a single one is held up by a giant."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.partition.lengths import lognormal
from benchmarks.partition.placements import ROWS_PER_RANK, workloads_of
from commons.partition import balance_window, loads, step_ratios

RANKS, HIDDEN_SIZE = (8, 64), 128
NUM_STEPS = (1, 2, 4, 8)
STEP_RATIOS = (None, 1.25, 1.5, 2.0)


def measure_windows(draws: int) -> list[dict[str, Any]]:
    """A record for each number of ranks, steps and limit. A draw is as many global batches as the longest
    window has, divided into windows, so that all lengths of window plan the same samples."""
    cases = [(ranks, steps, limit) for ranks in RANKS for steps in NUM_STEPS for limit in STEP_RATIOS]
    return [
        _measure(ranks, steps, limit, draws)
        for ranks, steps, limit in tqdm(cases, desc="windows")
        if steps > 1 or limit is None  # a single step is the mean step
    ]


def _measure(ranks: int, num_steps: int, limit: float | None, draws: int) -> dict[str, Any]:
    rng = np.random.default_rng([0, ranks])
    over_ideal, largest_ratios, milliseconds = [], [], []
    for _ in range(draws):
        lengths = lognormal(rng, ROWS_PER_RANK * ranks * max(NUM_STEPS))
        workloads = workloads_of(lengths, HIDDEN_SIZE)[0]
        sum_of_largest = 0.0
        for window_workloads in np.split(workloads, max(NUM_STEPS) // num_steps):
            start = time.perf_counter()
            window = balance_window(window_workloads, ranks, num_steps, limit)
            milliseconds.append((time.perf_counter() - start) * 1e3)
            sum_of_largest += sum(loads(window_workloads, step).max() for step in window)
            largest_ratios.append(step_ratios(window_workloads, window).max())
        over_ideal.append(sum_of_largest / (workloads.sum() / ranks))
    return {
        "ranks": ranks,
        "num_steps": num_steps,
        "max_step_ratio": limit,
        "draws": draws,
        "largest_loads_over_ideal": round(float(np.mean(over_ideal)), 6),
        "largest_step_ratio": {
            "mean": round(float(np.mean(largest_ratios)), 4),
            "max": round(float(max(largest_ratios)), 4),
        },
        "ms_median": round(float(np.median(milliseconds)), 4),
    }
