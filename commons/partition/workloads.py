"""Checks of arguments that all partition functions share, and workloads as exact integers."""

from __future__ import annotations

import math
from numbers import Integral

import numpy as np
from numpy.typing import ArrayLike

from .compiled import compiled

# Loads are sums of int64: exact in any order, so no machine's way of adding decides a tie. Two bits are left
# for differences and doubled gaps.
LOAD_BITS = 60
# Loads times speeds, and loads ÷ speeds, are exact enough for float64 with so many.
SPEED_BITS = 48


def as_workloads(workloads: ArrayLike, name: str = "workloads") -> np.ndarray:
    """`workloads` as a float64 array `[samples]`.

    Integers up to 2**53 stay exact; sums of larger ones overflow int64 but not float64.

    Raises:
        ValueError: not one-dimensional, or a value is negative, NaN, or infinite.
    """
    values = np.asarray(workloads, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"{name} has shape {values.shape}, expected one number per sample")
    values = np.require(values, requirements=["C", "W"])  # for other arrays numba would compile anew
    bad = _first_bad(values)
    if bad >= 0:
        raise ValueError(f"{name}[{bad}] is {values[bad]}, expected a finite number of at least 0")
    return values


def as_integers(values: np.ndarray, bits: int = LOAD_BITS) -> np.ndarray:
    """Scales non-negative float64 `[samples]` by a power of two and rounds them to int64.

    The power is the largest that keeps the sum below 2**bits for sure, so the unit of the numbers does not
    matter. Rounding changes a number by at most 2**(1 − bits) of the largest possible sum.
    """
    return _as_integers(values, bits)


def check_count(name: str, count: int, minimum: int = 1) -> None:
    """Raises ValueError, naming the argument, unless it is a whole number of at least `minimum`."""
    if not isinstance(count, Integral) or count < minimum:
        raise ValueError(f"{name} is {count}, expected a whole number of at least {minimum}")


@compiled
def _first_bad(values: np.ndarray) -> int:
    for i in range(len(values)):
        if not 0 <= values[i] < np.inf:  # NaN compares as False
            return i
    return -1


@compiled
def _as_integers(values: np.ndarray, bits: int) -> np.ndarray:
    scaled = np.empty(len(values), dtype=np.int64)
    largest = 0.0
    for value in values:
        largest = max(largest, value)
    shift = bits - math.frexp(largest)[1] - math.frexp(float(len(values)))[1]
    for i in range(len(values)):
        scaled[i] = np.int64(np.rint(math.ldexp(values[i], shift)))
    return scaled
