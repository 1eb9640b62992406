"""Checks of settings, whose errors name the given value and the expected one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np


class SettingError(ValueError):
    """A setting is out of range, or has no effect with other settings.

    Args:
        text: message, in which a setting's name in braces stands for its name and value.
        settings: values of these settings, by name.
    """

    def __init__(self, text: str, **settings: object) -> None:
        self._text, self._settings = text, settings
        super().__init__(self.show(lambda name, value: f"{name}={value!r}"))

    def show(self, setting: Callable[[str, object], str]) -> str:
        """Returns the message, in which `setting` formats each name and value."""
        shown = {name: setting(name, value) for name, value in self._settings.items()}
        return self._text.format(**shown)

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownSettingError(SettingError, KeyError):
    """A setting is not one of the known names."""


def require_type(name: str, value: object, annotation: Any) -> None:
    """Raises a TypeError with the argument's name, value and type if the annotation does not allow the value.

    An integer also counts as a float, and a bool as neither. NumPy scalars count as Python's. Lists and
    tuples are interchangeable, because gin files write either.
    """
    if not _has_type(value, annotation):
        expected = re.sub(r"\w+\.", "", inspect.formatannotation(annotation)).replace(" | ", " or ")
        raise TypeError(f"{name} = {value!r} ({type(value).__name__}): expected {expected}")


def check_types(settings: Any) -> None:
    """Requires that each field of a dataclass has its annotated type, as `require_type` does."""
    name, annotations = type(settings).__name__, get_type_hints(type(settings))
    for field in fields(settings):
        require_type(f"{name}.{field.name}", getattr(settings, field.name), annotations[field.name])


def _has_type(value: object, annotation: Any) -> bool:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is UnionType:
        return any(_has_type(value, member) for member in arguments)
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(_has_type(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _has_type(key, arguments[0]) and _has_type(item, arguments[1]) for key, item in value.items()
        )
    if annotation in (int, float):
        numbers = Integral if annotation is int else Real
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, bool | np.bool_ if annotation is bool else annotation)
