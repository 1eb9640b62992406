"""Searches for as few cuts of samples as balance needs, and for the rank of each piece."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ...distributed.placement import (
    allows,
    excess_tokens,
    partition,
    place_rows,
    relative_speeds,
    times,
    token_tolerance,
)
from ...distributed.plan import RowTable
from ...distributed.settings import ShufflerSettings
from ...partition import lower_bound, rebalance
from ...partition.problem import number_of_part
from .cost_ranges import CostRanges, cut_heavy, level
from .cutting import COLUMN, MIN_TOKENS, Cutting

# Samples are cut if whole samples cannot come this close to the mean load, whatever tolerance is set.
TOLERANCE = 0.01
# Number of attempts to keep the limits on rows and tokens. Each attempt cuts oversized rows further.
MAX_ATTEMPTS = 8
# Number of attempts that also bring groups together. With more samples than this, only one attempt is made,
# because an attempt may take most of a second at 32,768 samples.
GROUP_ATTEMPTS, FEW_SAMPLES = 3, 8192


def compile_search() -> None:
    """Compiles the functions that the search calls, or loads them from numba's cache."""
    work, home = np.array([2, 5, 7, 2, 5, 1, 5]), np.array([1, 0, 0, 1, 0, 0, 0])
    rebalance(work, home, 2, tolerance=0.0)
    ones = np.ones(2, dtype=np.int64)
    whole = cut_heavy(ones, 1, home[:0], home[:0], home[:0])
    level(whole, 0 * ones, 2 * ones, ones, ones, np.arange(2), 1, 1)


def cut_and_place(
    samples: RowTable, settings: ShufflerSettings, cutting: Cutting
) -> tuple[RowTable, np.ndarray]:
    """Cuts the samples of a step that prevent balance, or exceed `max_tokens`, and places all rows.

    Returns the samples, with pieces in place of each cut sample, and the rank of each row, int64 `[rows]`.
    Raises a ValueError if no placement was found that keeps the limits.
    """
    # Added up one by one, so that all processors get the same last bit.
    total = np.bincount(np.zeros_like(samples.home), samples.workloads, minlength=1)[0]
    speeds = relative_speeds(samples)
    mean = float(total) / (samples.num_ranks if speeds is None else math.fsum(speeds.tolist()))
    highest = mean * (1 + TOLERANCE)
    has_giant = samples.workloads.max(initial=0) > highest
    rank_of = None
    if not has_giant:
        rank_of = _rank_of_whole(samples, settings)
        if rank_of is not None and _is_balanced(samples, settings, rank_of, highest):
            return samples, rank_of
    if has_giant or rank_of is not None:
        pieces, rank_of_piece = _pieces_of_equal_loads(samples, settings, cutting, mean, rank_of)
        if pieces.begin.any():
            made, rank_of = _cut_between(samples, cutting, pieces, rank_of_piece)
            if allows(made, rank_of, settings):
                even = _with_even_tokens(made, rank_of, settings, mean)
                later = np.flatnonzero(~made.starts_sample)
                if (even[later] != even[later - 1]).all():
                    return made, even
                items = made.columns[COLUMN]["first_item"][later]  # neighboring pieces now share a rank
                return _cut_where_ranks_change(samples, cutting, made.sample_of[later], items, even)
        else:  # samples are too short to be cut
            rank_of = _rank_of_whole(samples, settings) if rank_of is None else rank_of
            if rank_of is not None:
                return samples, rank_of
    return _cut_by_tokens(samples, settings, cutting, highest)


def _rank_of_whole(samples: RowTable, settings: ShufflerSettings) -> np.ndarray | None:
    """Returns the rank of each whole sample, or None if whole samples do not fit under `max_tokens`."""
    try:
        return place_rows(samples, settings)
    except ValueError:
        if settings.max_tokens is None:
            raise
        return None


def _is_balanced(samples: RowTable, settings: ShufflerSettings, rank_of: np.ndarray, highest: float) -> bool:
    """Returns whether no rank is above the highest load, or whole samples could be balanced.
    With equal speeds, the lower bound decides whether they could. Otherwise, no load gets close to it."""
    if times(samples, rank_of).max() <= highest:
        return True
    if relative_speeds(samples) is not None:
        return False
    return lower_bound(samples.workloads, samples.num_ranks, equal_size=False) <= 1 + TOLERANCE


def _pieces_of_equal_loads(
    samples: RowTable, settings: ShufflerSettings, cutting: Cutting, mean: float, rank_of: np.ndarray | None
) -> tuple[CostRanges, np.ndarray]:
    """Returns as few pieces as balance needs, regardless of `max_tokens`, and their ranks, int64 `[pieces]`.

    Samples that are too heavy for one rank fill whole ranks, and their remainders are placed like any other
    sample. Then overloaded ranks give a piece of a sample to another rank.

    Each of these three steps may use a quarter of the tolerance: filling ranks, placing, and giving away. The
    last quarter is for rounding cuts to whole items.

    `mean` is the load of a rank of speed 1. `rank_of` holds the ranks of whole samples, if none is too heavy.
    """
    full, most = int(mean * (1 + TOLERANCE / 4)), int(mean * (1 + TOLERANCE * 3 / 4))
    giants = np.flatnonzero(samples.workloads > mean * (1 + TOLERANCE))
    pieces = cut_heavy(samples.workloads, full, giants, *cutting.least_costs(samples, giants))
    if rank_of is None:
        share = pieces.costs / np.maximum(samples.workloads, 1)[pieces.sample]
        rows = samples.take(pieces.sample)
        rows = replace(rows, workloads=pieces.costs, sample_bytes=np.ceil(rows.sample_bytes * share))
        without_tokens = {"tokens": None, "max_tokens": None, "token_tolerance": None}
        rank_of = partition(rows, settings, tolerance=TOLERANCE / 4, **without_tokens)
    loads = np.bincount(rank_of, pieces.costs, minlength=samples.num_ranks).astype(np.int64)
    speeds = relative_speeds(samples)
    if speeds is not None:
        loads += full - (full * speeds).astype(np.int64)  # so that slower ranks are full at the same load
    is_long = samples.tokens >= 2 * MIN_TOKENS  # the others cannot be cut
    on_heavy = np.flatnonzero((loads > most)[rank_of] & is_long[pieces.sample])
    if on_heavy.size:
        least = cutting.least_costs(samples, pieces.sample[on_heavy])
        pieces, rank_of = level(pieces, rank_of, loads, *least, on_heavy, most, full)
    return pieces, rank_of


def _cut_between(
    samples: RowTable, cutting: Cutting, pieces: CostRanges, rank_of: np.ndarray
) -> tuple[RowTable, np.ndarray]:
    """Cuts at the items closest to the bounds of pieces. Makes no empty piece, and no cut within a rank."""
    later = np.flatnonzero(pieces.begin)
    numbers = pieces.sample[later]
    items = cutting.items_before(samples, numbers, pieces.begin[later])
    nothing_after = np.append((numbers[1:] == numbers[:-1]) & (items[1:] == items[:-1]), False)
    return _cut_where_ranks_change(samples, cutting, *_without(numbers, items, rank_of, nothing_after))


def _with_even_tokens(
    samples: RowTable, rank_of: np.ndarray, settings: ShufflerSettings, mean: float
) -> np.ndarray:
    """Returns the ranks, int64 `[rows]`, after a few moves that even out tokens without a longer step.
    They stay as they are if the partitioner heeds groups."""
    if excess_tokens(samples, rank_of, settings) == 0 or _heeds_columns(samples, settings):
        return rank_of
    longest, speeds = times(samples, rank_of).max() / mean, relative_speeds(samples)
    bound = lower_bound(samples.workloads, samples.num_ranks, equal_size=False, speeds=speeds)
    partition = rebalance(
        samples.workloads,
        rank_of,
        samples.num_ranks,
        max(longest / bound - 1, 0.0) + 1e-9,  # never below `longest`, despite rounding
        samples.sample_bytes,
        samples.ranks_per_node,
        equal_size=False,
        tokens=samples.tokens,
        max_tokens=settings.max_tokens,
        speeds=speeds,
        token_tolerance=token_tolerance(samples, settings),
    )
    return number_of_part(partition, len(rank_of))


def _without(
    numbers: np.ndarray, items: np.ndarray, rank_of: np.ndarray, needless: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drops the `needless` cuts, bool `[cuts]`, and the ranks of the rows that follow them."""
    rows_after = numbers[needless] + np.flatnonzero(needless) + 1
    return numbers[~needless], items[~needless], np.delete(rank_of, rows_after)


def _cut_where_ranks_change(
    samples: RowTable, cutting: Cutting, numbers: np.ndarray, items: np.ndarray, rank_of: np.ndarray
) -> tuple[RowTable, np.ndarray]:
    """Makes only the cuts between different ranks. `rank_of` has the ranks of rows if all cuts were made."""
    rows_before = numbers + np.arange(len(numbers))
    numbers, items, rank_of = _without(
        numbers, items, rank_of, rank_of[rows_before] == rank_of[rows_before + 1]
    )
    return (cutting.cut(samples, numbers, items) if len(numbers) else samples), rank_of


def _cut_by_tokens(
    samples: RowTable, settings: ShufflerSettings, cutting: Cutting, highest: float
) -> tuple[RowTable, np.ndarray]:
    """Cuts for balance and limits, with more pieces than balance needs, and then brings groups together.

    A sample gets two pieces for every rank that it needs, with equal numbers of items. Because costs grow
    along a sample, an early and a late piece together cost as much as two from its middle, and one rank may
    take both. If ranks are still above the highest load, the largest piece on each is cut further.
    """
    cap = settings.max_tokens or np.inf
    needed = np.maximum(samples.workloads / max(highest, 1), samples.tokens / cap)
    num_pieces = np.where(needed > 1, 2 * np.ceil(needed), 1).astype(np.int64)
    # Groups come last, because otherwise every attempt to keep the limits would place them, too.
    alone = replace(samples, columns={name: samples.columns[name] for name in cutting.count_names})
    whole = _rank_of_whole(alone, settings)
    best = None if whole is None else (alone, whole)
    made, rank_of = _cut_within_limits(alone, settings, cutting, highest, num_pieces, MAX_ATTEMPTS, best)
    columns = {name: column[made.sample_of] for name, column in samples.columns.items()}
    made = replace(made, columns={**columns, **made.columns})
    if not _heeds_columns(samples, settings):
        return made, rank_of
    num_pieces = np.bincount(made.sample_of, minlength=len(num_pieces))
    attempts = GROUP_ATTEMPTS if len(num_pieces) <= FEW_SAMPLES else 1
    return _cut_within_limits(samples, settings, cutting, highest, num_pieces, attempts, (made, rank_of))


def _cut_within_limits(
    samples: RowTable,
    settings: ShufflerSettings,
    cutting: Cutting,
    highest: float,
    num_pieces: np.ndarray,
    attempts: int,
    best: tuple[RowTable, np.ndarray] | None,
) -> tuple[RowTable, np.ndarray]:
    """Cuts samples into `num_pieces` pieces, int64 `[samples]`, or into more if that is not enough.

    Returns `best`, rows and the rank of each, unless an attempt keeps the limits and takes no longer than
    the larger of `best`'s time and `highest`. The result may have more pieces than `best`.
    """
    most = cutting.most_pieces(samples)
    num_pieces = np.minimum(num_pieces, most)
    for attempt in range(attempts):
        numbers, items = cutting.even_cuts(samples, num_pieces)
        made = cutting.cut(samples, numbers, items) if len(numbers) else samples
        sample_of = made.sample_of
        is_last = attempt == attempts - 1
        try:
            # If nothing is cut, `best` may already be this placement.
            rank_of = best[1] if best is not None and best[0] is made else place_rows(made, settings)
        except ValueError:
            further = np.unique(sample_of[made.tokens > made.tokens.max() / 2])
            if best is not None:  # the finer pieces do not fit the limits
                return best
            if is_last or not (num_pieces < most)[further].any():
                raise
        else:
            loads = times(made, rank_of)
            largest_first = np.lexsort((-made.workloads, rank_of))
            too_slow = np.searchsorted(rank_of[largest_first], np.flatnonzero(loads > highest))
            further = np.unique(sample_of[largest_first[too_slow]])
            further = further[num_pieces[further] < most[further]]
            if best is None or loads.max() <= max(times(*best).max(), highest):
                best = _cut_where_ranks_change(samples, cutting, numbers, items, rank_of)
            if is_last or not further.size:
                return best
        more = num_pieces[further] + np.maximum(num_pieces[further] // 2, 1)
        num_pieces[further] = np.minimum(more, most[further])
    raise AssertionError("the last attempt returns or raises")


def _heeds_columns(samples: RowTable, settings: ShufflerSettings) -> bool:
    """Returns whether the partitioner takes an extension's column, such as groups."""
    return any(settings.takes(name, samples.partitioner) for name in samples.columns)
