"""Measures of balance: loads, imbalance, and the lower bound."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from .problem import Problem
from .workloads import as_speeds, as_workloads, check_count


def loads(workloads: ArrayLike, partition: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the total workload of each part, float64 `[parts]`. `partition` has an index array per part."""
    values = as_workloads(workloads)
    return np.array([values[part].sum() for part in partition])


def imbalance(
    workloads: ArrayLike, partition: Sequence[np.ndarray], speeds: ArrayLike | None = None
) -> float:
    """Returns the largest load ÷ the mean load of the parts. 1.0 means perfect balance, or no load.

    With `speeds` `[parts]`, returns the longest time ÷ the time that loads proportional to speed would take.

    Raises:
        ValueError: there are no parts, or `longest_processing_time` would reject `workloads` or `speeds`.
    """
    check_count("num_partitions", len(partition))
    return relative_to_mean(loads(workloads, partition), speeds)


def relative_to_mean(
    part_loads: np.ndarray, speeds: ArrayLike | None = None, total: float | None = None
) -> float:
    """Returns the `imbalance` of non-negative loads, `[parts]`. Their mean follows from `total`, if given."""
    relative = as_speeds(speeds, len(part_loads))
    mean = (part_loads.sum() if total is None else total) / relative.sum()
    return float((part_loads / relative).max() / mean) if mean > 0 else 1.0


def lower_bound(
    workloads: ArrayLike, num_partitions: int, equal_size: bool = True, speeds: ArrayLike | None = None
) -> float:
    """Returns an `imbalance` that no partition of whole samples beats.

    Some q parts together hold at least j·q of the m = (j − 1)·parts + q largest samples. If the q parts with
    the most of these held fewer, one would hold at most j − 1, as would each part outside the q. Then all
    parts together would hold fewer than m. The j·q samples weigh at least as much as the lightest j·q of the
    m. With `equal_size`, the q parts fill up to ⌊samples ÷ parts⌋ each, at best with the lightest samples of
    all. The bound is the maximum over all j and q, the mean load, and the largest sample.

    With `speeds`, the q parts are at most as fast as the q fastest. The q slowest parts have at least the
    lightest samples, as many as the part sizes demand. Arguments and errors are those of `karmarkar_karp`.
    """
    problem = Problem.of(workloads, num_partitions, equal_size, speeds=speeds)
    if not as_workloads(workloads).any():
        return 1.0
    return float(max(1.0, problem.shortest_time() * problem.speeds.sum() / problem.work.sum()))
