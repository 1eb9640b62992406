"""Argument checks that all partition functions share, and the rounding of workloads to exact integers."""

from __future__ import annotations

import math
from numbers import Integral

import numpy as np
from numpy.typing import ArrayLike

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
        ValueError: `check_wide` rejects workloads, or they are not `num_samples` finite non-negative numbers.
    """
    if name == "workloads":
        check_wide(workloads, name)
    values = np.asarray(workloads, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"{name} has shape {values.shape}, expected one number per sample")
    check_each(name, values, (values >= 0) & (values < np.inf), "a finite number of at least 0")
    if num_samples not in (None, len(values)):
        raise ValueError(f"{name} has {len(values)} values for {num_samples} workloads")
    return values


def check_wide(numbers: object, name: str) -> None:
    """Raises ValueError for masked arrays, complex types, and types in which squares may have wrapped."""
    dtype = str(getattr(numbers, "dtype", "")).removeprefix("torch.")
    if isinstance(numbers, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array, whose mask would be lost: fill it, or leave samples out")
    if dtype in _NARROW:
        raise ValueError(f"{name} is of {dtype}, in which FLOPs overflow; compute it from lengths in int64")
    if dtype.startswith("complex"):
        raise ValueError(f"{name} is of {dtype}, expected real numbers")


def as_integers(values: np.ndarray, bits: int) -> np.ndarray:
    """Scales float64 `[samples]` by a power of two, so that sums stay below 2**bits, and rounds to int64.

    Results are at least 1. Rounding changes a number by at most 2**(1 − bits) of the largest possible sum.
    """
    shift = bits - 1 - math.frexp(values.max(initial=0))[1] - math.frexp(len(values))[1]
    return np.maximum(np.rint(np.ldexp(values, shift)), 1).astype(np.int64)


def as_tokens(tokens: ArrayLike, num_samples: int) -> np.ndarray:
    """Returns `tokens` as int64 `[samples]`. Raises ValueError unless they are non-negative whole numbers."""
    amounts = as_workloads(tokens, "tokens", num_samples)
    check_each("tokens", amounts, amounts == np.floor(amounts), "a whole number")
    if amounts.sum() >= MOST_TOKENS:
        raise ValueError(f"tokens add up to {amounts.sum():.3g}, expected less than 2**53")
    return amounts.astype(np.int64)


def as_capped_tokens(
    tokens: ArrayLike | None, max_tokens: int | None, tolerance: float | None, count: int, num_parts: int
) -> np.ndarray:
    """Checks the options on tokens. Returns those of `count` samples, int64, or zeros for None."""
    if tokens is None:
        for name, value in (("max_tokens", max_tokens), ("token_tolerance", tolerance)):
            if value is not None:
                raise ValueError(f"{name} is given without tokens")
        return np.zeros(count, dtype=np.int64)
    if max_tokens is None and tolerance is None:
        raise ValueError("tokens is given without max_tokens, or token_tolerance in functions that take it")
    check_tolerance(tolerance or 0.0, "token_tolerance")
    amounts = as_tokens(tokens, count)
    if max_tokens is not None:
        check_count("max_tokens", max_tokens, minimum=0)
        check_each("tokens", amounts, amounts <= int(max_tokens), f"at most max_tokens={max_tokens}")
        room, total = num_parts * int(max_tokens), int(amounts.sum())
        if total > room:
            raise ValueError(
                f"max_tokens={max_tokens} is too small: {num_parts} parts hold at most {room} tokens, "
                f"the samples have {total}"
            )
    return amounts


def as_speeds(speeds: ArrayLike | None, num_partitions: int) -> np.ndarray:
    """Returns speeds relative to the fastest, float64 `[parts]`. Raises ValueError for invalid speeds."""
    if speeds is None:
        return np.ones(num_partitions)
    values = np.array(speeds, dtype=np.float64)
    if values.shape != (num_partitions,):
        raise ValueError(f"speeds has shape {values.shape}, expected one for each of {num_partitions} parts")
    check_each("speeds", values, (values > 0) & (values < np.inf), "a finite number above 0")
    is_near = MAX_SPEED_RATIO * values >= values.max()
    check_each("speeds", values, is_near, f"the fastest part to be at most {MAX_SPEED_RATIO} times as fast")
    return values / values.max()
