"""Remedies for fields that have not a row per sample, by their shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from .optional_types import KeyedJaggedTensor
from .row_lists import RECIPE, are_samples
from .row_schema import FieldValue, lengths_of
from .tree import Part

PER_SAMPLE = 'mark it with field(metadata={"per_sample": False})'
SHARED_FIELDS = "name it in the shuffler's shared_fields"


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
    remedy = remedy_for_field(name, fields, expected, SHARED_FIELDS)
    return f"{name!r} has {rows[name]} and others {expected}. {remedy}"


def remedy_for_field(name: str, fields: Mapping[str, FieldValue], num_rows: int, declare: str) -> str:
    """Returns what to do about a field with other than `num_rows` rows; `declare` says how it is shared."""
    fitting = _fitting_form(fields[name], fields, num_rows, name)
    stays = f"If it is no data of samples, {declare}: it then stays with its rank, and never moves"
    if fitting:
        return f"{fitting[0].upper()}{fitting[1:]}. {stays}"
    return f"Give it a row per sample, or make it a JaggedTensor of as many per sample as there are. {stays}"


def _fitting_form(value: FieldValue, fields: Mapping[str, FieldValue], num_rows: int, name: str) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    count = value.shape[0]
    for other, jagged in fields.items():
        if isinstance(jagged, torch.Tensor):
            continue
        if len(jagged.values()) == count:
            return f"if it has a number for each of {other!r}, make it a JaggedTensor with the same lengths"
        keys = jagged.keys() if isinstance(jagged, KeyedJaggedTensor) else []
        totals = lengths_of(jagged).view(len(keys), -1).sum(1).tolist() if keys else []
        for key, total in zip(keys, totals, strict=True):
            if total == count:
                return (
                    f"if it has a number for each element of {key!r} in {other!r}, make it a JaggedTensor "
                    "with that key's lengths"
                )
    if value.dim() == 1 and _are_offsets(value):
        return "offsets belong to the values that they divide: make both one JaggedTensor(values, offsets=…)"
    for other, tensor in fields.items():
        are_offsets = isinstance(tensor, torch.Tensor) and tensor.dim() == 1 and _are_offsets(tensor)
        if other != name and are_offsets and int(tensor[-1]) == count:
            return f"values that {other!r} divides: make both one JaggedTensor(values, offsets={other})"
    if value.dim() > 1 and value.shape[1] == num_rows:
        return "rows are in its dim 1: transpose(0, 1) puts them first"
    if num_rows and count % num_rows == 0 and value.dim() == 1 and count:
        return (
            f"if it has {count // num_rows} numbers per sample, view it as [{num_rows}, {count // num_rows}]"
        )
    return ""


def _are_offsets(value: torch.Tensor) -> bool:
    if value.is_floating_point() or value.dtype == torch.bool or len(value) < 2:
        return False
    return int(value[0]) == 0 and bool((value.diff() >= 0).all()) and int(value[-1]) > 0
