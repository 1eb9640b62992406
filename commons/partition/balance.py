"""Measures of balance: loads, imbalance, and the lower bound."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from .problem import Problem
from .workloads import as_speeds, as_workloads, check_count


def loads(workloads: ArrayLike, partition: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of the workloads of each part, float64 `[parts]`; `partition` holds an index array per part."""
    values = as_workloads(workloads)
    return np.array([values[part].sum() for part in partition])


def imbalance(
    workloads: ArrayLike, partition: Sequence[np.ndarray], speeds: ArrayLike | None = None
) -> float:
    """Largest load ÷ mean load of the parts; 1.0 is perfect, and the value where nothing costs anything.

    With `speeds` `[parts]`, times take the place of loads: the longest ÷ the one that all parts would take if
    their loads were proportional to their speeds.

    Raises:
        ValueError: there are no parts; a workload is negative, NaN, or infinite; or `speeds` are not a number
            above 0 per part.
    """
    check_count("num_partitions", len(partition))
    return relative_to_mean(loads(workloads, partition), speeds)


def relative_to_mean(part_loads: np.ndarray, speeds: ArrayLike | None = None) -> float:
    """Largest ÷ mean of non-negative numbers `[parts]`, as `imbalance` takes them; 1.0 where all are 0."""
    if speeds is not None:
        relative = as_speeds(speeds, len(part_loads))
        part_loads, mean = part_loads / relative, part_loads.sum() / relative.sum()
    else:
        mean = part_loads.mean()
    return float(part_loads.max() / mean) if mean > 0 else 1.0


def lower_bound(
    workloads: ArrayLike, num_partitions: int, equal_size: bool = True, speeds: ArrayLike | None = None
) -> float:
    """An imbalance that no partition of whole samples beats; relative to the mean load.

    Some q parts together hold at least j·q of the m = (j − 1)·parts + q largest samples. Otherwise one of
    the q parts with the most of them would hold fewer than j, the other parts no more, and all together fewer
    than m. These j·q weigh at least as much as the lightest j·q of the m. With `equal_size`, the q parts hold
    other samples, too, up to ⌊samples ÷ parts⌋ each, which weigh no less than the lightest samples of all.
    The bound is the largest over all j and q, among them the mean load and the largest sample.

    With `speeds` `[parts]`, the q parts are no faster than the q fastest, and the bound is relative as
    `imbalance` is. The q slowest parts have the lightest samples at least, as many as sizes demand.

    Raises:
        ValueError: `num_partitions` is below 1; a workload is negative, NaN, or infinite; or `speeds` are not
            a number above 0 per part.
    """
    problem = Problem.of(workloads, num_partitions, equal_size, speeds=speeds)
    total = problem.work.sum()
    if total == 0:
        return 1.0
    return float(max(1.0, problem.shortest_time() * float(problem.speeds.sum()) / total))
