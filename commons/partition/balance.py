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

    With `speeds` `[parts]`, the longest time ÷ the one of all parts with loads proportional to speeds.

    Raises:
        ValueError: there are no parts, or as `longest_processing_time`.
    """
    check_count("num_partitions", len(partition))
    return relative_to_mean(loads(workloads, partition), speeds)


def relative_to_mean(part_loads: np.ndarray, speeds: ArrayLike | None = None) -> float:
    """`imbalance`, given loads of at least 0, `[parts]`."""
    if speeds is not None:
        relative = as_speeds(speeds, len(part_loads))
        part_loads, mean = part_loads / relative, part_loads.sum() / relative.sum()
    else:
        mean = part_loads.mean()
    return float(part_loads.max() / mean) if mean > 0 else 1.0


def lower_bound(
    workloads: ArrayLike, num_partitions: int, equal_size: bool = True, speeds: ArrayLike | None = None
) -> float:
    """An `imbalance` that no partition of whole samples beats; arguments and errors as of `karmarkar_karp`.

    Some q parts together hold at least j·q of the m = (j − 1)·parts + q largest samples. Otherwise one of
    the q parts with the most of them would hold fewer than j, the other parts no more, and all together fewer
    than m. These j·q weigh at least as much as the lightest j·q of the m. With `equal_size`, the q parts hold
    other samples, too, up to ⌊samples ÷ parts⌋ each, which weigh no less than the lightest samples of all.
    The bound is the largest over all j and q, among them the mean load and the largest sample.

    With `speeds`, the q parts are no faster than the q fastest, and the q slowest have the lightest samples
    at least, as many as sizes demand.
    """
    problem = Problem.of(workloads, num_partitions, equal_size, speeds=speeds)
    if not as_workloads(workloads).any():
        return 1.0
    total = problem.work.sum()
    return float(max(1.0, problem.shortest_time() * float(problem.speeds.sum()) / total))
