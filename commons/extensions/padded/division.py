"""Divisions of a step's rows into runs, one for each rank or micro-batch, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...distributed.row_table import RowTable
from .loss_rows import sorted_rows, spread_loss_rows
from .runs import Limits, cut_into_runs, padded_costs, ranks_of_runs

# By how much a limit on real tokens grows until it allows a division.
_GIVE_WAY = 1.05


@dataclass(frozen=True)
class Division:
    """The rank and the micro-batch of each row of a step, and what these cost if they pad.

    Attributes:
        rank_of: int64 `[rows]`, the rank of each row.
        micro_batch: int64 `[rows]`, the micro-batch of each row on its rank, the lightest first.
        num_parts: number of micro-batches of each rank; 0 if batches run whole.
        loads: float64 `[ranks]`, cost of each rank.
        padded_tokens: float64 `[ranks × micro-batches]`, rows × longest tokens.
        num_rows: int64 `[ranks × micro-batches]`.
        least: largest load of a rank that no runs undercut.
    """

    rank_of: np.ndarray
    micro_batch: np.ndarray
    num_parts: int
    loads: np.ndarray
    padded_tokens: np.ndarray
    num_rows: np.ndarray
    least: float

    @staticmethod
    def of(
        rows: RowTable,
        rank_of: np.ndarray,
        micro_batch: np.ndarray,
        num_parts: int,
        num_rows: np.ndarray | None = None,
        least: float | None = None,
    ) -> Division:
        """Returns the division with its costs. `num_rows` is int64 `[ranks]`, with padding rows."""
        per_rank = max(num_parts, 1)
        slots, num_slots = rank_of * per_rank + micro_batch, rows.num_ranks * per_rank
        if num_rows is None:
            num_rows = np.bincount(slots, minlength=num_slots)
        # Copies, because numba compiles anew for read-only arrays.
        loads = padded_costs(rows.work.copy(), slots, num_rows.copy()).reshape(-1, per_rank).sum(1)
        padded = padded_costs(rows.tokens[:, None].copy(), slots, num_rows.copy())
        least = float(loads.max()) if least is None else least
        return Division(rank_of, micro_batch, num_parts, loads, padded, num_rows, least)

    def meets(self, limits: Limits) -> bool:
        """Returns whether ranks or micro-batches of several rows are within the limits."""
        within = (self.padded_tokens <= limits.padded_tokens) & (self.num_rows <= limits.samples)
        return bool((within | (self.num_rows <= 1)).all())

    @property
    def largest_load(self) -> float:
        """Cost of the slowest rank."""
        return float(self.loads.max())


def divide_where_loaded(rows: RowTable, limits: Limits, in_parts: bool) -> Division:
    """Leaves rows on their ranks, whole as loaded, or cut into as few micro-batches as the limits allow."""
    if not in_parts:
        return Division.of(rows, rows.home, np.zeros_like(rows.home), 0, rows.batch_sizes)
    order = np.lexsort((-rows.workloads, rows.home))
    starts = np.append(rows.home_start, len(order))
    num_parts, ends = _fewest_parts(rows, order, starts, 1, limits)
    run_of = np.empty_like(order)
    run_of[order] = np.searchsorted(ends.ravel(), np.arange(len(order)), side="right")
    return Division.of(rows, rows.home, num_parts - 1 - run_of % num_parts, num_parts)


def divide_by_runs(
    rows: RowTable, limits: Limits, in_parts: bool, max_real_tokens: float | None, most_cost: int
) -> Division | None:
    """Gives each rank one run, or as few runs of like cost as the limits allow, the same number to each.

    Args:
        rows: the rows of a step.
        limits: limits of each run.
        in_parts: whether each run is a micro-batch.
        max_real_tokens: largest real tokens of a rank ÷ their mean, as far as other limits allow it.
        most_cost: cost that a run may reach for a row with loss tokens.

    Returns:
        The division; None if the limits allow none.
    """
    order, num_ranks = sorted_rows(rows), rows.num_ranks
    work, tokens, starts = rows.work[order], rows.tokens[order], np.array([0, len(order)])
    if in_parts:
        num_parts, ends = _fewest_parts(rows, order, starts, num_ranks, limits)
    else:
        num_parts, (fits, ends) = 0, cut_into_runs(work, tokens, starts, num_ranks, limits)
        if not fits:
            return None
    if max_real_tokens is not None:
        most = int(max_real_tokens * tokens.sum() / ends.size)
        ends = _with_fewer_real_tokens(work, tokens, ends, limits, most)
    run_of = np.searchsorted(ends[0], np.arange(len(order)), side="right")
    costs = padded_costs(work, run_of, np.bincount(run_of, minlength=ends.size))
    least = None if in_parts else float(costs.max())
    if work.shape[1] > 1 and not in_parts:
        least = _least(rows.workloads[order], tokens, num_ranks, limits, float(costs.max()))
    relaxed = limits._replace(cost=most_cost)
    run_of = spread_loss_rows(run_of, rows.loss_tokens[order] > 0, work, tokens, relaxed)
    part_of, number = _deal(costs, num_ranks)
    by_rank = np.argsort(part_of[run_of], kind="stable")
    rows_by_rank = order[by_rank]
    rank_of_part = ranks_of_runs(
        part_of[run_of[by_rank]],
        rows.home[rows_by_rank],
        rows.sample_bytes[rows_by_rank],
        num_ranks,
        rows.ranks_per_node or num_ranks,
    )
    rank_of, micro_batch = np.empty_like(order), np.empty_like(order)
    rank_of[order], micro_batch[order] = rank_of_part[part_of[run_of]], number[run_of]
    return Division.of(rows, rank_of, micro_batch, num_parts, least=least)


def _fewest_parts(
    rows: RowTable, order: np.ndarray, starts: np.ndarray, num_ranks: int, limits: Limits
) -> tuple[int, np.ndarray]:
    """Returns the fewest micro-batches per rank for which each list of rows has runs, and the runs' ends."""
    work, tokens = rows.work[order], rows.tokens[order]
    sums = np.append(0, np.cumsum(np.minimum(tokens, limits.padded_tokens)))
    most, most_rows = (int(np.diff(of).max(initial=0)) for of in (sums[starts], starts))
    least_runs = max(-(-most // limits.padded_tokens), -(-most_rows // limits.samples))
    num_parts = max(-(-least_runs // num_ranks), 1)
    while True:
        fits, ends = cut_into_runs(work, tokens, starts, num_ranks * num_parts, limits)
        if fits:
            return num_parts, ends
        num_parts += 1  # runs of one row each always fit


def _deal(costs: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Deals runs in rounds, from the heaviest on, each to the part with the least load so far.

    Returns the part of each run, and its number in that part, the lightest first.
    """
    num_rounds = len(costs) // num_ranks
    if num_rounds == 1:
        return np.arange(num_ranks), np.zeros(num_ranks, dtype=np.int64)
    heaviest_first = np.argsort(-costs, kind="stable").reshape(num_rounds, num_ranks)
    part_of, number, loads = (
        np.empty(len(costs), np.int64),
        np.empty(len(costs), np.int64),
        np.zeros(num_ranks),
    )
    for past, runs in enumerate(heaviest_first):
        parts = np.argsort(loads, kind="stable")
        part_of[runs], number[runs] = parts, num_rounds - 1 - past
        loads[parts] += costs[runs]
    return part_of, number


def _with_fewer_real_tokens(
    work: np.ndarray, tokens: np.ndarray, ends: np.ndarray, limits: Limits, most: int
) -> np.ndarray:
    """Returns the ends of as many runs, with at most so many real tokens each, or as few as is possible."""
    starts, total = np.array([0, len(tokens)]), int(tokens.sum())
    while most < total:
        fits, found = cut_into_runs(work, tokens, starts, ends.size, limits._replace(real_tokens=most))
        if fits:
            return found
        most = int(most * _GIVE_WAY) + 1
    return ends


def _least(work: np.ndarray, tokens: np.ndarray, num_ranks: int, limits: Limits, largest: float) -> float:
    """Returns a load that no placement undercuts: that of runs of rows whose columns are added up."""
    starts = np.array([0, len(work)])
    fits, ends = cut_into_runs(work[:, None], tokens, starts, num_ranks, limits)
    run_of = np.searchsorted(ends[0], np.arange(len(work)), side="right")
    least = padded_costs(work[:, None], run_of, np.bincount(run_of, minlength=num_ranks)).max()
    return min(float(least), largest) if fits else largest
