"""Instances and parameters of gin configurables, and checks of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import gin

from ..argument_checks import require

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


def require_setting(settings: object, is_valid: bool, field: str, expected: str) -> None:
    """Requires that a field of gin settings is valid. The error names the field as gin files do."""
    require(is_valid, f"{type(settings).__name__}.{field}", getattr(settings, field), expected)


def require_settings_at_least(least: int, settings: object, *fields: str) -> None:
    """Requires that some fields of gin settings are at least `least`, or None."""
    for field in fields:
        value = getattr(settings, field)
        require_setting(settings, value is None or value >= least, field, f"at least {least}")
