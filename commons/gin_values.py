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


def is_configured(name: str) -> bool:
    """Whether the parsed gin configuration sets any argument of the configurable `name`."""
    return any(selector.split(".")[-1] == name for _, selector in gin.config._CONFIG)
