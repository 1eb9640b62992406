"""Compares how well plain loading and `BucketSampler` balance ranks.

Computes loads over whole epochs of random histories, and of MovieLens 100K if its folder is given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Record, average, list_cases, measure_cases
from benchmarks.markdown import pivot
from benchmarks.partition.placements import (
    LOGNORMAL,
    ML_100K,
    compute_workloads,
    draw_lognormal,
    read_movielens_lengths,
)
from commons.bucket_sampler import BucketSampler
from commons.datasets import SequenceDataset
from commons.extensions.controller import step_ratios
from commons.partition.imbalance import loads

RANKS, ROWS_PER_RANK, HIDDEN_SIZES, EPOCHS = 8, (32, 8), (128, 1024), 20
NUM_LOGNORMAL = 8192
# Number of buckets by name. 0 means plain loading.
LOADINGS = {"as loaded": 0, "1 bucket": 1, "4 buckets": 4, "8 buckets": 8}


class _Indices(list[int]):
    """A source whose samples are their own indices, and whose batches are lists of indices."""

    def collate(self, samples: list[int], batch_size: int) -> list[int]:
        return samples


def measure(movielens: Path | None = None) -> Record:
    """Returns means over the epochs, one record per lengths, rows per rank, hidden size, and loading."""
    known = {} if movielens is None else {ML_100K: read_movielens_lengths(movielens)}
    known[LOGNORMAL] = draw_lognormal(np.random.default_rng(0), NUM_LOGNORMAL)

    def measure_epochs(lengths: str, rows_per_rank: int, hidden_size: int, loading: str) -> Record:
        workloads = compute_workloads(known[lengths], hidden_size)[0]
        epochs = range(EPOCHS)
        return average([_assess(workloads, rows_per_rank, LOADINGS[loading], epoch) for epoch in epochs])

    cases = list_cases(lengths=known, rows_per_rank=ROWS_PER_RANK, hidden_size=HIDDEN_SIZES, loading=LOADINGS)
    return {"records": measure_cases(cases, measure_epochs, "loading")}


def _assess(workloads: np.ndarray, rows: int, num_buckets: int, epoch: int) -> dict[str, float]:
    """Returns the figures of an epoch. Incomplete steps count, except in the step ratio."""
    by_rank: list[Any] = [
        BucketSampler(workloads, rows, rank, RANKS, num_buckets)
        if num_buckets
        else SequenceDataset(_Indices(range(len(workloads))), rows, rank, RANKS, shuffle=True)
        for rank in range(RANKS)
    ]
    for source in by_rank:
        source.set_epoch(epoch)
    steps = [[np.array(batch, dtype=np.int64) for batch in step] for step in zip(*by_rank, strict=True)]
    complete = [step for step in steps if sum(map(len, step)) == rows * RANKS]
    slowest = sum(loads(workloads, step).max() for step in steps)
    return {
        "largest_loads_over_ideal": slowest / (workloads.sum() / RANKS),
        "largest_step_ratio": float(step_ratios(workloads, complete).max()),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker, with a column for each way of loading."""
    rows = {"lengths": "{lengths}", "rows": "{rows_per_rank}", "d": "{hidden_size}"}
    cell = "{largest_loads_over_ideal:.3f} / {largest_step_ratio:.3f}"
    records = [record for record in figures["records"] if record["loading"] in LOADINGS]
    return {"loading balance": pivot(records, rows, "{loading}", cell)}
