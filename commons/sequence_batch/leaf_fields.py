"""The leaves of a batch, whose rows can be sent: tensors and jagged tensors. Advises on mismatched fields."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from .container_types import DECLARE_SHARED, MORE_KINDS, type_name
from .row_schema import FieldValue, lengths_of, with_parts

Leaf: TypeAlias = FieldValue
# Only these exact types arrive complete: subclasses may hold more.
_EXACT_TYPES = (torch.Tensor, JaggedTensor, KeyedJaggedTensor)


def check_leaf(leaf: Leaf) -> None:
    """Raises a TypeError if a leaf's rows cannot be sent one by one, or something in it would be lost."""
    for part in (leaf, *(tensor for _, tensor in tensors_of(leaf))):
        _check(part)


def num_rows(name: str, value: FieldValue) -> int:
    """Returns the number of rows of a per-sample field.

    Raises:
        ValueError: the field has no rows, or its rows are not samples.
    """
    if isinstance(value, KeyedJaggedTensor):
        if value.variable_stride_per_key():
            raise ValueError(
                f"{name} is a KeyedJaggedTensor with a variable batch size per key (VBE), whose rows are not "
                "samples; give every key one row per sample"
            )
        if not (value.keys() or value.stride()):
            raise ValueError(
                f"{name} is a KeyedJaggedTensor without keys, which does not tell its number of rows: give "
                "it stride=, or leave it out"
            )
        return value.stride()
    if isinstance(value, JaggedTensor):
        return lengths_of(value).numel()
    if value.dim() == 0:
        raise ValueError(
            f"{name} is a tensor without rows (0-d); give it one row per sample, or declare what all samples "
            f"share: {DECLARE_SHARED}"
        )
    return value.shape[0]


def remedy_for_rows(fields: Mapping[str, FieldValue], rows: Mapping[str, int]) -> str:
    """Returns advice for a user whose fields have different numbers of rows, which `rows` holds by name."""
    jagged = [rows[name] for name, value in fields.items() if not isinstance(value, torch.Tensor)]
    expected = Counter(jagged or rows.values()).most_common(1)[0][0]
    name = next(name for name in rows if rows[name] != expected)
    return f"{name!r} has {rows[name]} and others {expected}. {remedy_for_field(name, fields, expected)}"


def remedy_for_field(name: str, fields: Mapping[str, FieldValue], expected: int) -> str:
    """Returns advice for a user whose field `name` does not have `expected` rows."""
    common = "Give it a row per sample, or make it a JaggedTensor if the number of values varies by sample"
    return (
        f"{_fitting_form(name, fields, expected) or common}. If it holds no data of samples, declare so: "
        f"{DECLARE_SHARED}; it then stays with its rank, and never moves"
    )


def _fitting_form(name: str, fields: Mapping[str, FieldValue], expected: int) -> str:
    value = fields[name]
    if not isinstance(value, torch.Tensor):
        return ""
    count = len(value)
    sizes = [len(of if isinstance(of, torch.Tensor) else of.values()) for of in fields.values()]
    for other, field in fields.items():
        if isinstance(field, torch.Tensor):
            if _are_offsets(field, sizes):
                return (
                    f"{other!r} has offsets, which belong to the values that they divide: make both one "
                    "JaggedTensor(values, offsets=...)"
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
    if value.dim() > 1 and value.shape[1] == expected:
        return "Rows are in its dim 1: transpose(0, 1) puts them first"
    if value.dim() == 1 and count and expected and count % expected == 0:
        each = count // expected
        return f"If it has {each} numbers per sample, view it as [{expected}, {each}]"
    return ""


def _are_offsets(value: torch.Tensor, sizes: list[int]) -> bool:
    """Returns whether numbers divide a field of one of these sizes. Sorted labels and ids look alike."""
    if value.dim() != 1 or len(value) < 2 or value.is_floating_point() or value.dtype == torch.bool:
        return False
    last, divides_few = int(value[-1]), len(value) - 1 in sizes and len(value) - 1 != int(value[-1])
    is_ascending = int(value[0]) == 0 and bool((value.diff() >= 0).all())
    return is_ascending and last in sizes and (last > len(value) or divides_few)


def tensors_of(leaf: Any) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors that a leaf has, each with a suffix for its name, such as ".values()"."""
    if isinstance(leaf, torch.Tensor):
        return [("", leaf)]
    parts = {"values": leaf.values(), "weights": leaf.weights_or_none()}
    parts |= {"lengths": leaf.lengths_or_none(), "offsets": leaf.offsets_or_none()}
    return [(f".{name}()", tensor) for name, tensor in parts.items() if tensor is not None]


def with_tensors(leaf: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a leaf with `change` applied to its tensors."""
    if isinstance(leaf, torch.Tensor):
        return change(leaf)
    parts = {"values": leaf.values(), "lengths": lengths_of(leaf), "weights": leaf.weights_or_none()}
    parts["offsets"] = leaf.offsets_or_none()
    return with_parts(leaf, **{name: change(part) for name, part in parts.items() if part is not None})


def pinned(leaf: Any) -> Any:
    """Returns a leaf in pinned host memory."""
    if isinstance(leaf, KeyedJaggedTensor):  # keeps what the leaf has cached
        return leaf.pin_memory()
    return with_tensors(leaf, torch.Tensor.pin_memory)


def _check(part: Leaf) -> None:
    """Raises a TypeError if a part would arrive incomplete, or if its rows cannot be sent as bytes."""
    if type(part) not in _EXACT_TYPES:
        plain = next(of for of in _EXACT_TYPES if isinstance(part, of)).__name__
        raise TypeError(
            f"a {type_name(part)} would arrive as a {plain}, without what the subclass adds; make it a "
            f"{plain}, and make what the subclass adds fields of their own"
        )
    if isinstance(part, KeyedJaggedTensor) and part.inverse_indices_or_none() is not None:
        raise TypeError(
            "a KeyedJaggedTensor has inverse_indices, which only refer to rows of this batch; leave them "
            "out, and deduplicate after the exchange"
        )
    if not isinstance(part, torch.Tensor):
        return
    if part.is_nested:
        raise TypeError(
            f"a nested tensor needs layout torch.jagged to be placed row by row, and {MORE_KINDS}"
        )
    if part.is_meta:
        raise TypeError("a tensor is on the device meta, and so has no contents to send; load it on the host")
    if part.layout != torch.strided:
        raise TypeError(f"a tensor has layout {part.layout}, whose rows cannot be sent; make it dense")
    if part.is_quantized or not _is_copied(part.dtype):
        raise TypeError(
            f"a tensor has dtype {part.dtype}, whose rows cannot be sent, because torch {torch.__version__} "
            "does not copy them byte by byte; send quantized values as integers of at least 8 bits "
            "(int_repr) next to their scale, and others as bytes, view(torch.uint8)"
        )


@functools.cache
def _is_copied(dtype: torch.dtype) -> bool:
    """Returns whether torch copies tensors of a dtype. Versions of torch differ, and none lists its dtypes.

    Without this check, selecting or copying rows would fail later, possibly on one rank only.
    """
    try:
        torch.empty(1, dtype=dtype, device="cpu").clone()
    except RuntimeError:
        return False
    return True
