"""Allocated memory that is not yet filled holds NaN and the largest integers, so that reading it shows."""

from typing import Any

import numpy as np
import torch
from numba.extending import overload

_empty, _empty_like = np.empty, np.empty_like


def poison_memory() -> None:
    """Poisons `torch.empty` and `np.empty` with their variants in this process, but not in compiled kernels.

    Kernels are poisoned where they run without compiling, as in `test_same_plans.py`.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)  # switches the filling on
    torch.utils.deterministic.fill_uninitialized_memory = True
    np.empty, np.empty_like = poisoned_empty, poisoned_empty_like


def poisoned_empty(*args: Any, **kwargs: Any) -> np.ndarray:
    return _poisoned(_empty(*args, **kwargs))


def poisoned_empty_like(*args: Any, **kwargs: Any) -> np.ndarray:
    return _poisoned(_empty_like(*args, **kwargs))


def _poisoned(array: np.ndarray) -> np.ndarray:
    kind = array.dtype.kind
    if kind in "fc":
        array.fill(np.nan)
    elif kind in "iu":
        array.fill(np.iinfo(array.dtype).max)
    elif kind == "b":
        array.fill(True)
    return array


# What numba compiles is the same as without, because its cache outlives the tests. Both signatures have to be
# equal, annotations included.
@overload(poisoned_empty)
def _compiled_empty(shape, dtype=float):
    return lambda shape, dtype=float: _empty(shape, dtype)


@overload(poisoned_empty_like)
def _compiled_empty_like(array):
    return lambda array: _empty_like(array)
