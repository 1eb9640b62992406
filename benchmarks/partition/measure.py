"""Balance, movement and time of every placement."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.partition.lengths import Lengths
from benchmarks.partition.placements import (
    AS_LOADED,
    RANKS_PER_NODE,
    GlobalBatch,
    Placement,
    draw_batches,
    placements_at,
)
from commons.partition import imbalance, lower_bound

RANKS, HIDDEN_SIZES = (2, 8, 64, 256, 1024), (128, 1024)
MIN_CALLS = {2: 240, 8: 240, 64: 240, 256: 90, 1024: 30}
SLOW_FROM, SLOW_DRAWS = 256, 3  # with so many ranks, a slow placement gets so few draws


def measure(lengths: dict[str, Lengths], draws: int) -> list[dict[str, Any]]:
    """A record for each lengths, hidden size, ranks and placement."""
    cases = [(name, size, ranks) for name in lengths for size in HIDDEN_SIZES for ranks in RANKS]
    records = []
    with tqdm(total=sum(len(placements_at(ranks)) for _, _, ranks in cases), desc="placements") as progress:
        for name, hidden_size, ranks in cases:
            batches = draw_batches(lengths[name], hidden_size, ranks, draws)
            for placement_name, placement in placements_at(ranks).items():
                repeats = 1 if placement.is_slow else -(-MIN_CALLS[ranks] // draws)
                few = placement.is_slow and ranks >= SLOW_FROM
                figures = _measure(placement, batches[: SLOW_DRAWS if few else draws], repeats)
                if placement_name == AS_LOADED:
                    del figures["ms"]
                case = {"lengths": name, "hidden_size": hidden_size, "ranks": ranks}
                records.append({**case, "placement": placement_name, **figures})
                progress.update()
    return records


def _measure(placement: Placement, batches: list[GlobalBatch], repeats: int) -> dict[str, Any]:
    """Means over the batches, and times of `repeats` calls for each, in turns, so that no call finds its
    own data in the cache."""
    if not placement.is_slow:
        placement.place(batches[0])  # compiles
    milliseconds, qualities = [], []
    for repeat in range(repeats):
        for batch in batches:
            start = time.perf_counter()
            partition = placement.place(batch)
            milliseconds.append((time.perf_counter() - start) * 1e3)
            if repeat == 0:
                qualities.append(_quality(batch, partition, placement.equal_rows))
    median, p99 = np.percentile(milliseconds, [50, 99]).tolist()
    return {
        "draws": len(batches),
        **{key: round(float(np.mean([each[key] for each in qualities])), 5) for key in qualities[0]},
        "ms": {"calls": len(milliseconds), "median": round(median, 4), "p99": round(p99, 4)},
    }


def _quality(batch: GlobalBatch, partition: list[np.ndarray], equal_rows: bool) -> dict[str, float]:
    """Of one batch; shares that move are of all samples and bytes, the parts being the ranks as they come."""
    rank_of = np.empty(len(batch.home), dtype=np.int64)
    rank_of[np.concatenate(partition)] = np.repeat(np.arange(batch.ranks), [len(part) for part in partition])
    moved = rank_of != batch.home
    crossed = rank_of // RANKS_PER_NODE != batch.home // RANKS_PER_NODE
    total_bytes = batch.sizes.sum()
    reached = imbalance(batch.workloads, partition)
    bound = lower_bound(batch.workloads, batch.ranks, equal_size=equal_rows)
    return {
        "imbalance": reached,
        "lower_bound": bound,
        "percent_above_bound": 100 * (reached / bound - 1),
        "largest_tokens": imbalance(batch.tokens, partition),
        "percent_of_samples_moved": 100 * moved.mean(),
        "percent_of_bytes_moved": 100 * batch.sizes[moved].sum() / total_bytes,
        "percent_of_bytes_across_nodes": 100 * batch.sizes[crossed].sum() / total_bytes,
    }
