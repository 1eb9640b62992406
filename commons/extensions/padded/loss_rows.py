"""Runs with loss tokens: a model that returns the mean of its losses divides by their number on each rank.

Short samples often have none: in next-item training, a sample of one item has nothing to predict. Sorted by
length, they would fill whole runs.
"""

from __future__ import annotations

import numpy as np

from ...distributed.row_table import RowTable
from .runs import Limits


def sorted_rows(rows: RowTable) -> np.ndarray:
    """Returns the numbers of rows by descending workload, int64 `[rows]`, with loss tokens all along.

    Rows without loss tokens that would come last alternate with the lightest rows that have some. Example:
    workloads 5, 2, 2, 1, 1, 1, 1, of which only the first three have loss tokens, become 5, 2, 1, 1, 2, 1, 1.
    """
    order = _heaviest_first(rows.workloads)
    has_loss = rows.loss_tokens[order] > 0
    givers, num_without = np.flatnonzero(has_loss), int((~has_loss).sum())
    if not num_without or not len(givers):
        return order
    # As many rows with loss tokens as average runs that the others would fill, and all of the same workload.
    needed = min(1 + num_without * rows.num_ranks // len(order), len(givers))
    lightest = rows.workloads[order[givers[len(givers) - needed]]]
    tail = np.count_nonzero(rows.workloads > lightest)
    with_loss, without = (tail + np.flatnonzero(has_loss[tail:] == wanted) for wanted in (True, False))
    places = np.concatenate(
        [2 * np.arange(len(with_loss)) * len(without), (2 * np.arange(len(without)) + 1) * len(with_loss)]
    )
    mixed = np.concatenate([with_loss, without])[np.argsort(places, kind="stable")]
    return np.concatenate([order[:tail], order[mixed]])


def _heaviest_first(work: np.ndarray) -> np.ndarray:
    """Returns the indices of `work`, int64 `[rows]`, in descending order, ties by index."""
    count, most = len(work), int(work.max(initial=0))
    if (most + 1) * count >= 2**63:
        return np.argsort(-work, kind="stable")
    keys = (most - work) * count + np.arange(count)  # all different, and sorted several times as fast
    keys.sort()
    return keys % max(count, 1)


def spread_loss_rows(
    run_of: np.ndarray, has_loss: np.ndarray, work: np.ndarray, tokens: np.ndarray, limits: Limits
) -> np.ndarray:
    """Swaps a row for each run without loss tokens, with a run next to it, as far as the limits allow.

    Args:
        run_of: int64 `[rows]`, the run of each row, ascending.
        has_loss: bool `[rows]`, whether a row has loss tokens.
        work: int64 `[rows, columns]`.
        tokens: int64 `[rows]`.
        limits: limits that both runs keep, those on cost and padded tokens.

    Returns:
        The run of each row, int64 `[rows]`.
    """
    counts = np.bincount(run_of, has_loss)
    for run in np.flatnonzero((counts == 0) & (np.bincount(run_of) > 0)).tolist():
        own, givers = np.flatnonzero(run_of == run), np.flatnonzero(has_loss & (counts[run_of] > 1))
        before, after = givers[givers < own[0]], givers[givers > own[-1]]
        possible = []
        for giver, returned in [
            *zip(before[-1:], own[:1], strict=False),
            *zip(after[:1], own[-1:], strict=False),
        ]:
            swapped = run_of.copy()
            swapped[[giver, returned]] = run, run_of[giver]
            both = [np.flatnonzero(swapped == each) for each in (run, run_of[giver])]
            cost, padded = (
                max(len(rows) * of[rows].max(0).sum(dtype=np.float64) for rows in both)
                for of in (work, tokens)
            )
            if cost <= limits.cost and padded <= limits.padded_tokens:
                possible.append((cost, giver, swapped))
        for _, giver, swapped in sorted(possible, key=lambda each: each[0])[:1]:
            counts[[run, run_of[giver]]] += 1, -1
            run_of = swapped
    return run_of
