"""Searches for cuts of samples that balance needs, and for the rank of each piece."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ...distributed.placement import place_rows, relative_speeds, times
from ...distributed.row_table import RowTable
from ...distributed.shuffler_settings import ShufflerSettings
from ...partition import lower_bound
from .cutting import COLUMN, Cutting

# Samples are cut if whole samples cannot come this close to the mean load, whatever tolerance is set.
TOLERANCE = 0.01
# Number of attempts to balance ranks and keep limits. Each attempt cuts oversized rows further.
MAX_ATTEMPTS = 8


def cut_and_place(
    samples: RowTable, settings: ShufflerSettings, cutting: Cutting
) -> tuple[RowTable, np.ndarray]:
    """Cuts the samples of a step that prevent balance, or exceed `max_tokens`, and places all rows.

    A sample gets two pieces for every rank that it needs, with equal numbers of items. Because costs grow
    along a sample, an early and a late piece together cost as much as two from its middle, and one rank may
    take both. If ranks are still above the highest load, the largest piece on each is cut further.

    Returns the samples, with pieces in place of each cut sample, and the rank of each row, int64 `[rows]`.

    Raises:
        ValueError: the limits cannot be kept, or no placement was found that keeps them.
    """
    # Added up one by one, so that all processors get the same last bit.
    total = np.bincount(np.zeros_like(samples.home), samples.workloads, minlength=1)[0]
    speeds = relative_speeds(samples)
    mean = float(total) / (samples.num_ranks if speeds is None else math.fsum(speeds.tolist()))
    highest = mean * (1 + TOLERANCE)
    whole = _rank_of_whole(samples, settings)
    if whole is not None and _is_balanced(samples, whole, highest):
        return samples, whole
    cap = settings.max_tokens or np.inf
    needed = np.maximum(samples.workloads / max(mean, 1), samples.tokens / cap)
    num_pieces = np.where(needed > 1, 2 * np.ceil(needed), 1).astype(np.int64)
    if settings.tolerance is not None:
        settings = replace(settings, tolerance=min(settings.tolerance, TOLERANCE))
    best = None if whole is None else (samples, whole)
    if not any(settings.takes(name, samples.partitioner) for name in samples.columns):
        return _cut_within_limits(samples, settings, cutting, highest, num_pieces, best)
    # Groups come last, because otherwise every attempt would bring them together, too.
    alone = replace(samples, columns={})
    made, rank_of = _cut_within_limits(alone, settings, cutting, highest, num_pieces, best)
    columns = {name: column[made.sample_of] for name, column in samples.columns.items()}
    made = replace(made, columns={**made.columns, **columns})
    try:
        together = place_rows(made, settings)
    except ValueError:  # the limits leave no room for groups
        return made, rank_of
    if times(made, together).max() > max(times(made, rank_of).max(), highest):
        return made, rank_of
    return _join_on_ranks(samples, cutting, made, together)


def _rank_of_whole(samples: RowTable, settings: ShufflerSettings) -> np.ndarray | None:
    """Returns the rank of each whole sample, or None if whole samples do not fit under `max_tokens`."""
    try:
        return place_rows(samples, settings)
    except ValueError:
        if settings.max_tokens is None:
            raise
        return None


def _is_balanced(samples: RowTable, rank_of: np.ndarray, highest: float) -> bool:
    """Returns whether no rank is above the highest load, or whole samples could be balanced.

    With equal speeds, the lower bound decides whether they could. Otherwise, no load gets close to it.
    """
    if times(samples, rank_of).max() <= highest:
        return True
    if relative_speeds(samples) is not None:
        return False
    return lower_bound(samples.workloads, samples.num_ranks, equal_size=False) <= 1 + TOLERANCE


def _cut_within_limits(
    samples: RowTable,
    settings: ShufflerSettings,
    cutting: Cutting,
    highest: float,
    num_pieces: np.ndarray,
    best: tuple[RowTable, np.ndarray] | None,
) -> tuple[RowTable, np.ndarray]:
    """Cuts samples into `num_pieces` pieces, int64 `[samples]`, or into more if that is not enough.

    Returns `best`, rows and the rank of each, unless an attempt keeps the limits and takes no longer than
    the larger of `best`'s time and `highest`.
    """
    most = cutting.most_pieces(samples)
    num_pieces = np.minimum(num_pieces, most)
    for attempt in range(MAX_ATTEMPTS):
        numbers, items = cutting.even_cuts(samples, num_pieces)
        made = cutting.cut(samples, numbers, items) if len(numbers) else samples
        sample_of = made.sample_of
        is_last = attempt == MAX_ATTEMPTS - 1
        try:
            # If nothing is cut, `best` may already be this placement.
            rank_of = best[1] if best is not None and not len(numbers) else place_rows(made, settings)
        except ValueError:
            further = np.unique(sample_of[made.tokens > made.tokens.max() / 2])
            if best is not None:  # the finer pieces do not fit the limits
                return best
            if is_last or not (num_pieces < most)[further].any():
                raise
        else:
            loads = times(made, rank_of)
            further = _largest_on(np.flatnonzero(loads > highest), made.workloads, rank_of, sample_of)
            further = further[num_pieces[further] < most[further]]
            if best is None or loads.max() <= max(times(*best).max(), highest):
                best = _join_on_ranks(samples, cutting, made, rank_of)
            if is_last or not further.size:
                return best
        more = num_pieces[further] + np.maximum(num_pieces[further] // 2, 1)
        num_pieces[further] = np.minimum(more, most[further])
    raise AssertionError("the last attempt returns or raises")


def _join_on_ranks(
    samples: RowTable, cutting: Cutting, made: RowTable, rank_of: np.ndarray
) -> tuple[RowTable, np.ndarray]:
    """Joins neighboring pieces of a sample that share a rank. Returns all rows, and the rank of each."""
    later = np.flatnonzero(~made.starts_sample)
    is_needless = rank_of[later] == rank_of[later - 1]
    if not is_needless.any():
        return made, rank_of
    cuts, rank_of = later[~is_needless], np.delete(rank_of, later[is_needless])
    if not cuts.size:
        return samples, rank_of
    return cutting.cut(samples, made.sample_of[cuts], made.columns[COLUMN]["first_item"][cuts]), rank_of


def _largest_on(
    ranks: np.ndarray, workloads: np.ndarray, rank_of: np.ndarray, sample_of: np.ndarray
) -> np.ndarray:
    """Returns the sample of the largest row on each of the given ranks, int64, ascending."""
    largest_first = np.lexsort((-workloads, rank_of))
    first = np.searchsorted(rank_of[largest_first], ranks)
    return np.unique(sample_of[largest_first[first]])
