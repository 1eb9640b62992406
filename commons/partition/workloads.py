"""Argument checks that all partition functions share, and the rounding of workloads to exact integers."""

from __future__ import annotations

import math
from numbers import Integral

import numpy as np
from numpy.typing import ArrayLike

# Loads are sums of int64, exact in any order, so ties do not depend on how a machine adds. With this many
# bits, load × speed and load ÷ speed are exact enough in float64.
LOAD_BITS = 48
# With a larger ratio, the times of the slowest parts would overflow.
MAX_SPEED_RATIO = 1000
# Sums of tokens below this are exact in float64.
MOST_TOKENS = 2**53
_NARROW = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32))


def check_count(name: str, count: int, minimum: int = 1) -> None:
    """Raises a ValueError that names the argument, unless `count` is a whole number of at least `minimum`."""
    if not isinstance(count, Integral) or isinstance(count, bool) or count < minimum:
        raise ValueError(f"{name} is {count}, expected a whole number of at least {minimum}")


def check_tolerance(tolerance: float, name: str = "tolerance") -> float:
    """Returns `tolerance`; raises ValueError unless it is a finite number of at least 0."""
    if not 0 <= tolerance < np.inf:
        raise ValueError(f"{name} is {tolerance}, expected a finite number of at least 0")
    return float(tolerance)


def check_each(name: str, values: np.ndarray, is_valid: np.ndarray, expected: str) -> None:
    """Raises a ValueError that names the first value that is not valid, and what was expected."""
    if not is_valid.all():
        first = int(np.argmin(is_valid))
        raise ValueError(f"{name}[{first}] is {values[first]}, expected {expected}")


def as_workloads(workloads: ArrayLike, name: str = "workloads", num_samples: int | None = None) -> np.ndarray:
    """Returns `workloads` as a float64 array `[samples]`.

    Raises:
        ValueError: `workloads` is not one-dimensional, is masked, has a narrow or complex type, has a value
            that is negative, NaN, or infinite, or does not have `num_samples` values.
    """
    if name == "workloads":
        check_wide(workloads, name)
    values = np.asarray(workloads, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"{name} has shape {values.shape}, expected one number per sample")
    is_valid = (values >= 0) & (values < np.inf)  # NaN compares as False
    check_each(name, values, is_valid, "a finite number of at least 0")
    if num_samples not in (None, len(values)):
        raise ValueError(f"{name} has {len(values)} values for {num_samples} workloads")
    return values


def check_wide(numbers: object, name: str) -> None:
    """Raises ValueError for masked arrays, complex types, and types in which squares may have wrapped."""
    dtype = str(getattr(numbers, "dtype", "")).removeprefix("torch.")
    if isinstance(numbers, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array, whose mask would be lost: fill it, or leave samples out")
    if dtype in _NARROW:
        raise ValueError(
            f"{name} is of {dtype}, in which squares and FLOPs overflow silently; compute it in int64, as "
            "in lengths.long() ** 2 or lengths.astype(np.int64) ** 2"
        )
    if dtype.startswith("complex"):
        raise ValueError(f"{name} is of {dtype}, expected real numbers")


def as_integers(values: np.ndarray, bits: int) -> np.ndarray:
    """Scales float64 `[samples]` by a power of two, so that sums stay below 2**bits, and rounds to int64.

    Results are at least 1. Rounding changes a number by at most 2**(1 − bits) of the largest possible sum.
    """
    shift = bits - 1 - math.frexp(values.max(initial=0))[1] - math.frexp(len(values))[1]
    return np.maximum(np.rint(np.ldexp(values, shift)), 1).astype(np.int64)


def bits_of_loads(count: int) -> int:
    """Returns the number of bits that the sum of all work may have, so that a key has room for it next to a
    sample or part number up to `count`. A difference of two sums takes one more bit."""
    return min(LOAD_BITS, 61 - count.bit_length())


def as_tokens(tokens: ArrayLike, num_samples: int) -> np.ndarray:
    """Returns `tokens` as int64 `[samples]`. Raises ValueError unless they are non-negative whole numbers."""
    amounts = as_workloads(tokens, "tokens", num_samples)
    check_each("tokens", amounts, amounts == np.floor(amounts), "a whole number")
    if amounts.sum() >= MOST_TOKENS:
        raise ValueError(f"tokens add up to {amounts.sum():.3g}, expected less than 2**53")
    return amounts.astype(np.int64)


def as_speeds(speeds: ArrayLike | None, num_partitions: int) -> np.ndarray:
    """Returns speeds relative to the fastest, float64 `[parts]`. Raises ValueError for invalid speeds."""
    if speeds is None:
        return np.ones(num_partitions)
    values = np.array(speeds, dtype=np.float64)
    if values.shape != (num_partitions,):
        raise ValueError(f"speeds has shape {values.shape}, expected one for each of {num_partitions} parts")
    check_each("speeds", values, (values > 0) & (values < np.inf), "a finite number above 0")
    if values.max() > MAX_SPEED_RATIO * values.min():
        raise ValueError(
            f"speeds are {values.min()} to {values.max()}, expected the fastest part to be at most "
            f"{MAX_SPEED_RATIO} times as fast as the slowest"
        )
    return values / values.max()
