"""Divides the samples of ranks into micro-batches under a token cap, the same number on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ...partition.kernels import NO_CAP, NONE
from ...partition.problem import number_of_part
from ...partition.workloads import as_workloads
from .packing import least_counts, pack

# With more rows per rank than this many times the ranks, placing one row of every rank at a time takes longer
# than dividing rank by rank.
MOST_ROWS_PER_RANK = 4


def number_micro_batches(
    work: np.ndarray, tokens: np.ndarray, max_tokens: int, rank_of: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, int]:
    """Divides every rank's samples into the smallest number of micro-batches that is found for all ranks.

    Loads need not be even, because ranks wait for each other only once per step. Placing by cost first keeps
    ranks at their bound, where packing all ranks' samples by tokens makes some ranks far heavier. Returns the
    micro-batch of each sample on its rank, the lightest first, int64 `[samples]`, and the number of
    micro-batches.
    """
    count = max(1, int(least_counts(tokens, max_tokens, rank_of, num_ranks).max()))
    while True:
        number = _divide_longest_first(work, tokens, max_tokens, rank_of, num_ranks, count)
        for rank in np.unique(rank_of[number == NONE]).tolist():
            own = np.flatnonzero(rank_of == rank)
            divided = pack(work[own], tokens[own], max_tokens, 1, count)
            if len(divided) > count:
                count = len(divided)
                break
            number[own] = number_of_part(divided, len(own))
        else:
            return number, count


def _divide_longest_first(
    work: np.ndarray, tokens: np.ndarray, max_tokens: int, rank_of: np.ndarray, num_ranks: int, count: int
) -> np.ndarray:
    """Divides all ranks' samples at once into `count` micro-batches. A rank that needs a search gets NONE.

    From the heaviest on, each sample joins the lightest micro-batch of its rank with room for its tokens.
    Before that, each sample above the cap gets an empty micro-batch.
    """
    sizes = np.bincount(rank_of, minlength=num_ranks)
    if sizes.max() > MOST_ROWS_PER_RANK * num_ranks:
        return np.full_like(rank_of, NONE)
    # 1. Line up each rank's samples, first those above the cap, then the heaviest. Fill up with zeros.
    order = np.lexsort((-work, tokens <= max_tokens, rank_of))
    is_real = np.arange(sizes.max()) < sizes[:, None]
    costs, amounts = np.zeros((2, *is_real.shape), dtype=np.int64)
    costs[is_real], amounts[is_real] = work[order], tokens[order]
    # 2. Place one sample of every rank at a time.
    ranks, chosen = np.arange(num_ranks), np.empty_like(costs)
    loads, filled = np.zeros((2, num_ranks, count), dtype=np.int64)
    is_good = np.ones(num_ranks, dtype=bool)
    for column in range(sizes.max()):
        needed = amounts[:, column, None]
        has_room = (filled + needed <= max_tokens) | ((needed > max_tokens) & (filled == 0))
        part = np.where(has_room, loads, NO_CAP).argmin(1)
        is_good &= has_room[ranks, part] | ~is_real[:, column]
        loads[ranks, part] += costs[:, column]
        filled[ranks, part] += amounts[:, column]
        chosen[:, column] = part
    # 3. Number them by load.
    by_load = np.argsort(np.argsort(loads, axis=1, kind="stable"), axis=1)
    number = np.empty_like(rank_of)
    number[order] = np.where(is_good[:, None], np.take_along_axis(by_load, chosen, 1), NONE)[is_real]
    return number


def micro_batch_imbalance(workloads: ArrayLike, micro_batches: Sequence[Sequence[np.ndarray]]) -> float:
    """Returns the sum over k of the largest load of a k-th micro-batch, ÷ the mean load of a rank.

    This is the relative time of a step whose ranks wait for each other after every micro-batch; 1.0 is
    perfect. `micro_batches` holds the sample indices of each micro-batch of each rank.
    """
    values = as_workloads(workloads)
    loads = np.array([[values[indices].sum() for indices in rank] for rank in micro_batches])
    return time_relative_to_mean(loads)


def time_relative_to_mean(loads: np.ndarray) -> float:
    """Returns the `micro_batch_imbalance` of non-negative loads, `[ranks, micro-batches]`."""
    mean = loads.sum(1).mean()
    return float(loads.max(0).sum() / mean) if mean > 0 else 1.0
