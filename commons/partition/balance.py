"""How well a partition is balanced, and how well it could be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from commons.partition.workloads import as_workloads, check_num_partitions


def loads(workloads: ArrayLike, partition: Sequence[np.ndarray]) -> np.ndarray:
    """float64 `[parts]`: the sum of the workloads of each part, `partition` being index arrays."""
    values = as_workloads(workloads)
    return np.array([values[part].sum() for part in partition])


def imbalance(workloads: ArrayLike, partition: Sequence[np.ndarray]) -> float:
    """Largest load ÷ mean load of the parts; 1.0 is perfect, and is what nothing to compute counts as.

    Raises:
        ValueError: no parts, or a workload is negative, NaN or infinite.
    """
    check_num_partitions(len(partition))
    return relative_to_mean(loads(workloads, partition))


def relative_to_mean(part_loads: np.ndarray) -> float:
    """Largest ÷ mean of non-negative numbers `[parts]`; 1.0 where all are zero."""
    mean = part_loads.mean()
    return float(part_loads.max() / mean) if mean > 0 else 1.0


def lower_bound(workloads: ArrayLike, num_partitions: int, equal_size: bool = True) -> float:
    """An imbalance that no partition of whole samples beats: max(mean load, largest workload) ÷ mean load.

    With `equal_size`, the part with the largest sample also holds at least ⌊samples ÷ parts⌋ − 1 others,
    which weigh no less than the smallest.

    Raises:
        ValueError: `num_partitions` below 1, or a workload is negative, NaN or infinite.
    """
    check_num_partitions(num_partitions)
    values = np.sort(as_workloads(workloads))
    total = values.sum()
    if total == 0:
        return 1.0
    largest = values[-1]
    if equal_size:
        companions = max(len(values) // num_partitions - 1, 0)
        largest += values[:companions].sum()
    return float(max(1.0, largest * num_partitions / total))
