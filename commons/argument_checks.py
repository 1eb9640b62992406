"""Checks of functions' arguments, whose errors name the given value and the expected one."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any


def require(is_valid: bool, name: str, value: object, expected: str) -> None:
    """Raises a ValueError unless `is_valid`. It names the argument and its value, and what is expected."""
    if not is_valid:
        raise ValueError(f"{name} = {value!r}: expected {expected}")


def require_at_least(least: int, name: str, value: int) -> None:
    """Requires that an argument is at least `least`."""
    require(value >= least, name, value, f"at least {least}")


def require_integer(name: str, value: Any) -> int:
    """Returns an argument as a Python int. Raises a TypeError for any other type, and for a bool, which is
    more often a mistake than a number."""
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} = {value!r} ({type(value).__name__}): expected an integer")
