"""Remedies for fields that have not a row per sample, by their shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from .leaf_fields import DECLARE_SHARED
from .optional_types import KeyedJaggedTensor
from .row_lists import RECIPE, are_samples
from .row_schema import FieldValue, lengths_of
from .tree import Part

_COMMON = "Give it a row per sample, or make it a JaggedTensor of as many per sample as there are"


def remedy_for_rows(tree: Part, fields: Mapping[str, FieldValue], rows: Mapping[str, int]) -> str:
    """Returns what to do if fields have these different numbers of rows, by name."""
    if are_samples(tree):
        return (
            f"If entries of the {type(tree.value).__name__} are samples, collate them to tensors with a row "
            f"each, or divide them by {RECIPE}"
        )
    jagged = [rows[name] for name, value in fields.items() if not isinstance(value, torch.Tensor)]
    expected = Counter(jagged or rows.values()).most_common(1)[0][0]
    name = next(name for name in rows if rows[name] != expected)
    return f"{name!r} has {rows[name]} and others {expected}. {remedy_for_field(name, fields, expected)}"


def remedy_for_field(name: str, fields: Mapping[str, FieldValue], num_rows: int) -> str:
    """Returns what to do about a field with other than `num_rows` rows."""
    return (
        f"{_fitting_form(name, fields, num_rows) or _COMMON}. If it is no data of samples, declare so: "
        f"{DECLARE_SHARED}; it then stays with its rank, and never moves"
    )


def _fitting_form(name: str, fields: Mapping[str, FieldValue], num_rows: int) -> str:
    value = fields[name]
    if not isinstance(value, torch.Tensor):
        return ""
    count = len(value)
    for other, field in fields.items():
        if isinstance(field, torch.Tensor):
            if _are_offsets(field) and (other == name or int(field[-1]) == count):
                return (
                    f"{other!r} has offsets, which belong to the values that they divide: make both one "
                    "JaggedTensor(values, offsets=…)"
                )
            continue
        if len(field.values()) == count:
            return f"If it has a number for each of {other!r}, make it a JaggedTensor with the same lengths"
        keys = field.keys() if isinstance(field, KeyedJaggedTensor) else []
        totals = lengths_of(field).view(len(keys), -1).sum(1).tolist() if keys else []
        for key in (key for key, total in zip(keys, totals, strict=True) if total == count):
            return (
                f"If it has a number for each element of {key!r} in {other!r}, make it a JaggedTensor "
                "with that key's lengths"
            )
    if value.dim() > 1 and value.shape[1] == num_rows:
        return "Rows are in its dim 1: transpose(0, 1) puts them first"
    if value.dim() == 1 and count and num_rows and count % num_rows == 0:
        each = count // num_rows
        return f"If it has {each} numbers per sample, view it as [{num_rows}, {each}]"
    return ""


def _are_offsets(value: torch.Tensor) -> bool:
    if value.dim() != 1 or len(value) < 2 or value.is_floating_point() or value.dtype == torch.bool:
        return False
    return int(value[0]) == 0 and bool((value.diff() >= 0).all()) and int(value[-1]) > 0
