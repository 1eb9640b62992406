"""Runs: samples of like cost, cut from a sorted list. A run pads its samples to its own longest.

Example: samples that cost 9, 8, 3, 3, 3, and 2 are cut for two ranks into [9, 8] and [3, 3, 3, 2], which cost
2 × 9 and 4 × 3. Mixed as [9, 3, 3] and [8, 3, 2], they would cost 3 × 9 and 3 × 8.

With one cost per sample and no other limit, no placement has a smaller largest cost. To see why, order the
parts of any placement by their largest samples, and deal the sorted samples out again in the same numbers.
No part then starts with a larger sample than it had, because it and all later parts held smaller ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...partition.compiled import compiled, inner
from ...partition.kernels import NONE, ONE, ZERO

# No limit. Products that could exceed it are compared in float64 first.
NO_LIMIT = 2**62


class Limits(NamedTuple):
    """Limits of each run. A run of one sample may exceed all but `cost`."""

    cost: int = NO_LIMIT  # its samples × the sum over columns of their largest work
    padded_tokens: int = NO_LIMIT  # its samples × the tokens of the longest
    real_tokens: int = NO_LIMIT  # the sum of tokens
    samples: int = NO_LIMIT


@inner
def _cut(
    work: np.ndarray, tokens: np.ndarray, limits: Limits, cost: int, ends: np.ndarray
) -> tuple[bool, int, int]:
    """Gives each run as many samples as fit, but leaves one for each later run. `ends` gets the runs' ends.

    Returns whether all samples fit, the largest cost of a run, and the least cost that was refused.
    """
    num_samples, num_runs = len(work), len(ends)
    end, largest, refused = ZERO, ZERO, ZERO + NO_LIMIT
    most_work = np.zeros(work.shape[1], dtype=np.int64)
    for run in range(num_runs):
        most_work[:] = ZERO
        size, each, most_tokens, sum_tokens = ZERO, ZERO, ZERO, ZERO
        last = min(max(num_samples - (num_runs - run - 1), end + 1), num_samples)
        while end < last:
            with_next, longest, grown = each, max(most_tokens, tokens[end]), float(size + 1)
            for column in range(len(most_work)):
                with_next += max(work[end, column] - most_work[column], 0)
            if grown * with_next > NO_LIMIT or (
                size > 0
                and (
                    size >= limits.samples
                    or grown * longest > limits.padded_tokens
                    or sum_tokens + tokens[end] > limits.real_tokens
                )
            ):
                break
            if (size + 1) * with_next > cost:
                refused = min(refused, (size + 1) * with_next)
                break
            for column in range(len(most_work)):
                most_work[column] = max(most_work[column], work[end, column])
            size, each, most_tokens = size + ONE, with_next, longest
            sum_tokens += tokens[end]
            end += ONE
        largest = max(largest, size * each)
        ends[run] = end
    return end == num_samples, largest, refused


@compiled
def cut_into_runs(
    work: np.ndarray, tokens: np.ndarray, starts: np.ndarray, num_runs: int, limits: Limits
) -> tuple[bool, np.ndarray]:
    """Cuts lists of samples into `num_runs` runs each, in the given order, so that the largest cost in each
    list is smallest. Returns whether the limits allow it, and the end of each run, int64 `[lists, runs]`.

    A run has at least one sample, if there are enough. For each list, the search halves the range of costs
    and steps from one cost that occurs to the next, so that it is exact. `work`, int64 `[samples, columns]`,
    is at least 0. `starts`, int64 `[lists + 1]`, tells where each list starts, and the number of samples.
    """
    best, ends = np.zeros((len(starts) - 1, num_runs), np.int64), np.zeros(num_runs, np.int64)
    for number in range(len(best)):
        start = starts[number]
        own, own_tokens = work[start : starts[number + 1]], tokens[start : starts[number + 1]]
        # 1. Any runs within the limits.
        fits, high, _ = _cut(own, own_tokens, limits, limits.cost, ends)
        if not fits:
            return False, best
        best[number] = ends + start
        # 2. Lower their cost. The mean, less some rounding, is a bound; an int64 sum could overflow.
        low = np.int64(own.astype(np.float64).sum() / num_runs * (1 - 2.0**-40))
        while low < high:
            # With many runs, the result is a little above the mean, so small steps come first.
            middle = low + min((high - low) // 2, low // 16 + 1)
            fits, largest, refused = _cut(own, own_tokens, limits, middle, ends)
            if fits:
                high = largest
                best[number] = ends + start
            else:
                low = min(refused, high)
    return True, best


@compiled
def padded_costs(work: np.ndarray, part_of: np.ndarray, num_rows: np.ndarray) -> np.ndarray:
    """Returns what each part costs, float64 `[parts]`: its rows × the sum over columns of the largest work,
    int64 `[samples, columns]`. `num_rows`, int64 `[parts]`, may include padding rows."""
    largest = np.zeros((len(num_rows), work.shape[1]), dtype=np.int64)
    for sample in range(len(work)):
        for column in range(work.shape[1]):
            at = part_of[sample], column
            largest[at] = max(largest[at], work[sample, column])
    return num_rows * largest.astype(np.float64).sum(1)


@compiled
def ranks_of_runs(
    run_of: np.ndarray, home: np.ndarray, sizes: np.ndarray, num_ranks: int, per_node: int
) -> np.ndarray:
    """Gives each run a rank of its own: the free one that holds most of its bytes, if any; otherwise one in
    the node, of `per_node` ranks, that holds most; otherwise any. Returns these ranks, int64 `[num_ranks]`.

    `run_of`, int64 `[samples]`, ascends, and runs without samples come last. `sizes` are bytes of samples.
    """
    rank_of, is_free = np.full(num_ranks, NONE), np.ones(num_ranks, dtype=np.bool_)
    starts = np.searchsorted(run_of, np.arange(num_ranks + 1))
    for width in (ONE, per_node):  # a rank, a node
        for run in np.flatnonzero(rank_of == NONE):
            samples, held = range(starts[run], starts[run + 1]), np.zeros(num_ranks, np.int64)
            for sample in samples:
                held[home[sample] // width] += sizes[sample]
            best, most = NONE, NONE
            for sample in samples:
                place = home[sample] // width
                if held[place] > most:
                    for rank in range(place * width, min((place + 1) * width, num_ranks)):
                        if is_free[rank]:
                            best, most = rank, held[place]
                            break
            if best != NONE:
                rank_of[run], is_free[best] = best, False
    rank_of[rank_of == NONE] = np.flatnonzero(is_free)
    return rank_of
