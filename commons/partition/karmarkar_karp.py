"""Karmarkar and Karp's differencing, the partitioning method that recsys-examples and verl use."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .kernels import place_by_differencing
from .problem import Problem, in_lists


@in_lists
def karmarkar_karp(
    workloads: ArrayLike, num_partitions: int, equal_size: bool = True, *, speeds: ArrayLike | None = None
) -> np.ndarray:
    """Partitions samples by differencing: repeatedly merges the two least balanced partial partitions.

    Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning", 1982. With `equal_size`, it
    starts from sets of `num_partitions` samples with similar workloads, and each part gets one sample of each
    set. With `speeds`, the fastest part gets the largest load, and so on.

    Arguments, result, and errors are those of `longest_processing_time`.
    """
    problem = Problem.of(workloads, num_partitions, equal_size, speeds=speeds)
    return problem.unsort(difference(problem, problem.num_parts if equal_size else 1))


def difference(problem: Problem, width: int) -> np.ndarray:
    """Runs `place_by_differencing`, and gives the largest load to the fastest part, and so on."""
    part_of = place_by_differencing(problem.work, problem.num_parts, width)
    return np.argsort(-problem.speeds, kind="stable")[part_of]


def bound_differencing(work: np.ndarray, num_parts: int) -> int:
    """Returns a lower bound on the time of the slowest part after differencing with equal sizes.

    Speeds are at most 1. The part with a set's heaviest sample gets at least the lightest of every other set.
    """
    lightest, spread = work[num_parts - 1 :: num_parts], work[::num_parts].copy()
    spread[: len(lightest)] -= lightest
    return int(lightest.sum() + spread.max(initial=0))
