"""Balance, movement and time of every placement."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np

from benchmarks.harness import Record, means, milliseconds, progress
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
from commons.partition.problem import number_of_part

RANKS, HIDDEN_SIZES = (2, 8, 64, 256, 1024), (128, 1024)
PASSES = 2
MIN_CALLS = {2: 240, 8: 240, 64: 240, 256: 90, 1024: 30}
SLOW_FROM, SLOW_DRAWS = 256, 3  # with so many ranks, a slow placement gets so few draws


def measure_placements(lengths: dict[str, Lengths], draws: int) -> list[Record]:
    """A record for each lengths, hidden size, ranks and placement."""
    each = list(product(lengths, HIDDEN_SIZES, RANKS))
    records: dict[tuple, Record] = {}
    times: dict[tuple, list[float]] = {}
    # What slows the machine for some seconds meets one pass of a case, not all.
    for number, case in enumerate(progress(each * PASSES, "placements")):
        batches, is_first = draw_batches(lengths[case[0]], *case[1:], draws), number < len(each)
        for name, placement in placements_at(case[2]).items():
            if placement.is_slow and not is_first:
                continue
            some = batches[: SLOW_DRAWS if placement.is_slow and case[2] >= SLOW_FROM else draws]
            if is_first:
                records[*case, name] = _qualities(placement, some)
            repeats = 1 if placement.is_slow else -(-MIN_CALLS[case[2]] // (draws * PASSES))
            # In turns, so that no call finds its data in the cache.
            times.setdefault((*case, name), []).extend(
                milliseconds(partial(placement.place, batch)) for batch in some * repeats
            )
    keys = ("lengths", "hidden_size", "ranks", "placement")
    return [
        {**dict(zip(keys, key, strict=True)), **figures, **({} if key[-1] == AS_LOADED else _ms(times[key]))}
        for key, figures in records.items()
    ]


def _ms(times: list[float]) -> Record:
    median, p99 = np.percentile(times, [50, 99]).tolist()
    return {"ms": {"calls": len(times), "median": round(median, 4), "p99": round(p99, 4)}}


def _qualities(placement: Placement, batches: list[GlobalBatch]) -> Record:
    """Means over the batches, and the largest distance from the bound; the calls also compile."""
    figures = [_quality(batch, placement.place(batch), placement.equal_rows) for batch in batches]
    farthest = max(each["percent_above_bound"] for each in figures)
    return {"draws": len(batches), **means(figures), "largest_percent_above_bound": round(farthest, 5)}


def _quality(batch: GlobalBatch, partition: list[np.ndarray], equal_rows: bool) -> dict[str, float]:
    """Returns the quality for one batch; moved shares are of all samples and bytes."""
    rank_of = number_of_part(partition, len(batch.home))
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
