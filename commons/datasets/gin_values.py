"""Instances and parameters of gin configurables, and checks of their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import gin

from ..argument_checks import require

T = TypeVar("T")
# Settings of 0.1.0 that are gone, and what to do instead.
GONE = {
    "balance_window": "delete it, because pipelines never plan several steps together",
    "balance_window_max_step_ratio": "delete it, because pipelines never plan several steps together",
}


def parse_gin(path: Path, bindings: Sequence[str]) -> None:
    """Parses a gin file, then bindings.

    Raises:
        ValueError: a setting is unknown. If it was known to version 0.1.0, the message says what to do.
        OSError: the file does not exist.
    """
    try:
        gin.parse_config_files_and_bindings([str(path)], list(bindings))
    except ValueError as error:
        for name, instead in GONE.items():
            if f"'{name}'" in str(error):
                raise ValueError(f"{name} is gone since 0.1.0: {instead}. {error}") from error
        raise


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
