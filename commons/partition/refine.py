"""Partitions from scratch: by differencing, longest first, and refined by swaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from .parts import NO_CAP
from .problem import Problem, number_of_part
from .search import difference, place_from_scratch, refine_within
from .token_search import level_tokens, price_nothing
from .workloads import check_tolerance


def karmarkar_karp(
    workloads: ArrayLike, num_partitions: int, equal_size: bool = True, *, speeds: ArrayLike | None = None
) -> list[np.ndarray]:
    """Partitions samples by differencing: merges the two worst balanced partial partitions, again and again.

    Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning", 1982.

    Args:
        workloads: `[samples]`, non-negative.
        num_partitions: parts, at least 1.
        equal_size: part sizes differ by at most one. Differencing then starts from sets of `num_partitions`
            samples of similar workload, and every part gets one of each set.
        speeds: as for `longest_processing_time`: the heaviest part goes to the fastest, and so on.

    Returns:
        For each part the ascending int64 indices of its samples. Ties are broken by index, so equal input
        gives equal output on every machine.

    Raises:
        ValueError: a workload is negative, NaN, or infinite; `num_partitions` is below 1; or `speeds` are not
            a number above 0 per part.
    """
    problem = Problem.of(workloads, num_partitions, equal_size, speeds=speeds)
    return problem.partition(difference(problem, problem.num_parts if equal_size else 1))


def longest_processing_time(
    workloads: ArrayLike,
    num_partitions: int,
    equal_size: bool = True,
    *,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
    speeds: ArrayLike | None = None,
) -> list[np.ndarray]:
    """Places each sample, the heaviest first, in the lightest part that can take it.

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.

    Args:
        workloads: `[samples]`, non-negative.
        num_partitions: parts, at least 1.
        equal_size: part sizes differ by at most one; else sizes follow the load.
        tokens: `[samples]`, whole numbers: a second quantity, capped by `max_tokens`.
        max_tokens: tokens of a part at most; given together with `tokens`.
        speeds: `[parts]`, above 0, in any unit: loads are divided by them, so that times become equal. None
            if all parts are equally fast.

    Returns:
        For each part the ascending int64 indices of its samples. Ties are broken by index, so equal input
        gives equal output on every machine. If the caps leave a sample without a place, the samples are
        balanced by their tokens instead.

    Raises:
        ValueError: a value is negative, NaN, or infinite; `num_partitions` is below 1; `speeds` are not a
            number above 0 per part; no placement can keep to the caps; or none that does was found. The last
            error names a sample that fits nowhere.
    """
    problem = Problem.of(workloads, num_partitions, equal_size, tokens, max_tokens, speeds)
    return problem.partition(place_from_scratch(problem))


def refined(
    workloads: ArrayLike,
    num_partitions: int,
    equal_size: bool = True,
    *,
    tolerance: float = 0.0,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
    speeds: ArrayLike | None = None,
    token_tolerance: float | None = None,
) -> list[np.ndarray]:
    """Runs `longest_processing_time`, then `refine`: the best balance of all functions here.

    It also starts from equal-size `karmarkar_karp` where that may be better, and is never worse than it.
    Where only that start is tried, longest first may be better by 1e-4 of the bound.

    Arguments, result, and errors are as theirs, and as those of `rebalance` for `token_tolerance`.
    """
    tolerance = check_tolerance(tolerance)
    problem = Problem.of(workloads, num_partitions, equal_size, tokens, max_tokens, speeds, token_tolerance)
    part_of = place_from_scratch(problem, tolerance)
    if problem.token_goal < NO_CAP:
        level_tokens(problem, price_nothing(problem), part_of, problem.target(tolerance))
    return problem.partition(part_of)


def refine(
    workloads: ArrayLike,
    partition: Sequence[ArrayLike],
    tolerance: float = 0.0,
    equal_size: bool = True,
    *,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
    speeds: ArrayLike | None = None,
) -> list[np.ndarray]:
    """Swaps samples between heavy and light parts until the tolerance is met or no swap helps.

    Where part sizes allow it, a swap may move one sample and return none. It helps if it takes at least 3e-5
    of the mean load off the heaviest part. The result is never worse than `partition`.

    Args:
        workloads: `[samples]`, non-negative.
        partition: for each part the indices of its samples; each sample is in one part.
        tolerance: the largest load ÷ speed may be (1 + tolerance) × the lower bound.
        equal_size, tokens, max_tokens, speeds: as for `longest_processing_time`; `partition` must keep to
            the limits, too.

    Returns:
        As `longest_processing_time`.

    Raises:
        ValueError: as `longest_processing_time`; or `tolerance` is negative; or `partition` does not hold
            each sample once, or does not keep to the limits.
    """
    tolerance = check_tolerance(tolerance)
    problem = Problem.of(workloads, len(partition), equal_size, tokens, max_tokens, speeds)
    part_of = problem.sort(number_of_part(partition, len(problem.work)))
    fault = problem.fault(part_of)
    if fault is not None:
        raise ValueError(fault)
    refine_within(problem, part_of, problem.target(tolerance))
    return problem.partition(part_of)
