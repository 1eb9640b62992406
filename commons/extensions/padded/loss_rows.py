"""Runs with loss tokens: a model that returns the mean of its losses divides by their number on each rank.

Short samples often have none: in next-item training, a sample of one item has nothing to predict. Sorted by
length, they would fill whole runs.
"""

from __future__ import annotations

import numpy as np

from ...distributed.plan import RowTable
from ...partition.problem import heaviest_first


def sorted_rows(rows: RowTable) -> np.ndarray:
    """Returns the numbers of rows by descending workload, int64 `[rows]`, with loss tokens all along.

    Rows without loss tokens that would come last alternate with the lightest rows that have some. Example:
    workloads 5, 2, 2, 1, 1, 1, 1, of which only the first three have loss tokens, become 5, 2, 1, 1, 2, 1, 1.
    """
    order = heaviest_first(rows.workloads)
    has_loss = rows.loss_tokens[order] > 0
    givers, num_without = np.flatnonzero(has_loss), int((~has_loss).sum())
    if not num_without or not len(givers):
        return order
    # As many rows with loss tokens as average runs that the others would fill, and all of the same workload.
    needed = min(1 + num_without * rows.num_ranks // len(order), len(givers))
    tail = np.count_nonzero(rows.workloads > rows.workloads[order[givers[-needed]]])
    with_loss, without = (tail + np.flatnonzero(has_loss[tail:] == wanted) for wanted in (True, False))
    places = np.concatenate(
        [2 * np.arange(len(with_loss)) * len(without), (2 * np.arange(len(without)) + 1) * len(with_loss)]
    )
    mixed = np.concatenate([with_loss, without])[np.argsort(places, kind="stable")]
    return np.concatenate([order[:tail], order[mixed]])


def spread_loss_rows(
    run_of: np.ndarray,
    has_loss: np.ndarray,
    work: np.ndarray,
    tokens: np.ndarray,
    most_cost: float,
    most_tokens: float,
) -> np.ndarray:
    """Swaps a row for each run without loss tokens, with the nearest run that keeps some, if limits allow it.

    Takes and returns the run of each row, int64 `[rows]`, ascending in `run_of`. `has_loss` tells which rows
    have loss tokens. Neither of the two runs may exceed `most_cost` and `most_tokens`, counted with padding.
    """
    counts = np.bincount(run_of, has_loss)
    for run in np.flatnonzero((counts == 0) & (np.bincount(run_of) > 0)).tolist():
        own, givers = np.flatnonzero(run_of == run), np.flatnonzero(has_loss & (counts[run_of] > 1))
        if not givers.size:
            break
        before, after = givers[givers < own[0]][-1:], givers[givers > own[-1]][:1]
        allowed = []
        for giver, returned in [*zip(before, own[:1], strict=False), *zip(after, own[-1:], strict=False)]:
            swapped = run_of.copy()
            swapped[[giver, returned]] = run, run_of[giver]
            both = [np.flatnonzero(swapped == each) for each in (run, run_of[giver])]
            cost, padded = (
                max(len(rows) * of[rows].max(0).sum(dtype=np.float64) for rows in both)
                for of in (work, tokens)
            )
            if cost <= most_cost and padded <= most_tokens:
                allowed.append((cost, giver, swapped))
        if allowed:
            _, giver, swapped = min(allowed, key=lambda each: each[0])
            counts[[run, run_of[giver]]] += 1, -1
            run_of = swapped
    return run_of
