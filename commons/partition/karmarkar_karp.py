"""Karmarkar and Karp's differencing, as users of recsys-examples and verl know it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .kernels import place_by_differencing
from .problem import Problem, in_lists


@in_lists
def karmarkar_karp(
    workloads: ArrayLike, num_partitions: int, equal_size: bool = True, *, speeds: ArrayLike | None = None
) -> np.ndarray:
    """Partitions samples by differencing: merges the two worst balanced partial partitions, again and again.

    Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning", 1982. With `equal_size`, it
    starts from sets of `num_partitions` samples of similar workload, and every part gets one of each set.
    With `speeds`, the heaviest part goes to the fastest, and so on.

    Arguments, result, and errors are as of `longest_processing_time`.
    """
    problem = Problem.of(workloads, num_partitions, equal_size, speeds=speeds)
    return problem.unsort(difference(problem, problem.num_parts if equal_size else 1))


def difference(problem: Problem, width: int) -> np.ndarray:
    """`place_by_differencing`, and the heaviest part to the fastest."""
    part_of = place_by_differencing(problem.work, problem.num_parts, width)
    return np.argsort(-problem.speeds, kind="stable")[part_of]


def bound_differencing(work: np.ndarray, num_parts: int) -> int:
    """A time that the slowest part, at most of speed 1, takes at least after differencing with equal sizes.

    The part with the heaviest of `num_parts` consecutive samples gets at least the lightest of all others.
    """
    lightest, spread = work[num_parts - 1 :: num_parts], work[::num_parts].copy()
    spread[: len(lightest)] -= lightest
    return int(lightest.sum() + spread.max(initial=0))
