"""The checks that every partition algorithm makes of its arguments."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def as_workloads(workloads: ArrayLike) -> np.ndarray:
    """`workloads` as a float64 array `[samples]`.

    Integers up to 2**53 stay exact; sums of larger ones overflow int64 but not float64.

    Raises:
        ValueError: not one-dimensional, or a value is negative, NaN or infinite.
    """
    values = np.asarray(workloads, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"workloads has shape {values.shape}, expected one number per sample")
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if bad.size:
        raise ValueError(f"workloads[{bad[0]}] is {values[bad[0]]}, expected a finite number of at least 0")
    return values


def check_num_partitions(num_partitions: int) -> None:
    """Raises ValueError if `num_partitions` is below 1."""
    if num_partitions < 1:
        raise ValueError(f"num_partitions is {num_partitions}, expected at least 1")
