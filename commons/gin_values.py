"""Instances of gin configurables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import gin

T = TypeVar("T")


def from_gin(configurable: Callable[..., T]) -> T:
    """An instance with the arguments that the parsed gin configuration gives.

    Raises:
        TypeError: an argument without a default is not configured; the message names it.
        ValueError: a value is out of range.
    """
    return configurable()


def is_bound(parameter: str) -> bool:
    """Whether the parsed gin configuration sets `parameter`, as in "TrainerArgs.seed"."""
    try:
        gin.query_parameter(parameter)
    except ValueError:
        return False
    return True
