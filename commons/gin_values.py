"""Instances and parameters of gin configurables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import gin

T = TypeVar("T")


def from_gin(configurable: Callable[..., T]) -> T:
    """Makes an instance with the arguments that the parsed gin configuration sets.

    Raises:
        TypeError: an argument without a default is not configured, or a value has the wrong type; the
            message names it.
        ValueError: a value is out of range.
    """
    return configurable()


def is_bound(parameter: str) -> bool:
    """Returns whether the parsed gin configuration sets `parameter`, such as "TrainerArgs.seed"."""
    try:
        gin.query_parameter(parameter)
    except ValueError:
        return False
    return True
