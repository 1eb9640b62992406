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
PASSES = 2
MIN_CALLS = {2: 240, 8: 240, 64: 240, 256: 90, 1024: 30}
SLOW_FROM, SLOW_DRAWS = 256, 3  # with so many ranks, a slow placement gets so few draws


def measure(lengths: dict[str, Lengths], draws: int) -> list[dict[str, Any]]:
    """A record for each lengths, hidden size, ranks and placement."""
    cases = [(name, size, ranks) for name in lengths for size in HIDDEN_SIZES for ranks in RANKS]
    records: dict[tuple, dict[str, Any]] = {}
    milliseconds: dict[tuple, list[float]] = {}
    with tqdm(total=PASSES * len(cases), desc="placements") as progress:
        # What slows the machine for some seconds meets one pass of a case, not all.
        for timing_pass in range(PASSES):
            for case in cases:
                batches = draw_batches(lengths[case[0]], *case[1:], draws)
                for name, placement in placements_at(case[2]).items():
                    if placement.is_slow and timing_pass > 0:
                        continue
                    few = placement.is_slow and case[2] >= SLOW_FROM
                    some = batches[: SLOW_DRAWS if few else draws]
                    if timing_pass == 0:
                        records[*case, name] = _qualities(placement, some)
                    repeats = 1 if placement.is_slow else -(-MIN_CALLS[case[2]] // (draws * PASSES))
                    milliseconds.setdefault((*case, name), []).extend(_times(placement, some, repeats))
                progress.update()
    keys = ("lengths", "hidden_size", "ranks", "placement")
    return [
        {**dict(zip(keys, key, strict=True)), **figures, **_spread(key, milliseconds)}
        for key, figures in records.items()
    ]


def _spread(key: tuple, milliseconds: dict[tuple, list[float]]) -> dict[str, Any]:
    if key[-1] == AS_LOADED:
        return {}
    times = milliseconds[key]
    median, p99 = np.percentile(times, [50, 99]).tolist()
    return {"ms": {"calls": len(times), "median": round(median, 4), "p99": round(p99, 4)}}


def _times(placement: Placement, batches: list[GlobalBatch], repeats: int) -> list[float]:
    """Milliseconds of `repeats` calls for each batch, in turns: no call finds its data in the cache."""
    milliseconds = []
    for batch in batches * repeats:
        start = time.perf_counter()
        placement.place(batch)
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return milliseconds


def _qualities(placement: Placement, batches: list[GlobalBatch]) -> dict[str, Any]:
    """Means over the batches, and the largest distance from the bound; the calls also compile."""
    figures = [_quality(batch, placement.place(batch), placement.equal_rows) for batch in batches]
    means = {key: round(float(np.mean([each[key] for each in figures])), 5) for key in figures[0]}
    farthest = max(each["percent_above_bound"] for each in figures)
    return {"draws": len(batches), **means, "largest_percent_above_bound": round(farthest, 5)}


def _quality(batch: GlobalBatch, partition: list[np.ndarray], equal_rows: bool) -> dict[str, float]:
    """Returns the quality for one batch; moved shares are of all samples and bytes."""
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
