"""Checks of arguments and settings."""

from __future__ import annotations

from typing import Any


def require(is_valid: bool, name: str, value: Any, expected: str) -> None:
    """Raises a ValueError that names the argument, its value, and what was expected, unless `is_valid`."""
    if not is_valid:
        raise ValueError(f"{name} = {value!r}: expected {expected}")


def require_at_least(least: int, **values: int) -> None:
    """Requires that each argument is at least `least`."""
    for name, value in values.items():
        require(value >= least, name, value, f"at least {least}")
