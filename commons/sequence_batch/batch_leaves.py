"""Leaves of batches: the tensors, jagged and keyed tensors that travel with the samples."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from tensordict import MemoryMappedTensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from .container_types import type_name
from .row_schema import FieldValue, with_parts

Leaf: TypeAlias = torch.Tensor | JaggedTensor | KeyedJaggedTensor | KeyedTensor

# Leaves that hold nothing but what travels: subclasses may. A memory-mapped tensor arrives in memory.
_EXACT_TYPES = (torch.Tensor, MemoryMappedTensor, JaggedTensor, KeyedJaggedTensor, KeyedTensor)
# torch has no copies of these, or copies that also need what is not in the bytes.
_REFUSED_DTYPES = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4} | {
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)
}


def field_name(path: str, leaf: Leaf) -> str:
    """Returns a leaf's path, with the keys of a KeyedTensor, on which ranks must agree."""
    if not isinstance(leaf, KeyedTensor):
        return path
    keys = zip(leaf.keys(), leaf.length_per_key(), strict=True)
    return f"{path}({', '.join(f'{key}: {width}' for key, width in keys)})"


def as_field(value: Any) -> FieldValue:
    """Returns a leaf as a field: a jagged nested tensor as a JaggedTensor, a KeyedTensor as a tensor.

    Raises:
        TypeError: a tensor whose rows do not simply follow one another, or something that would be lost when
            they move.
    """
    _check_type(value)
    field = value
    if isinstance(value, KeyedTensor):
        if value.key_dim() != 1:
            raise TypeError(f"a KeyedTensor has key_dim {value.key_dim()}; expected 1, so that dim 0 is rows")
        field = value.values()
    elif isinstance(value, torch.Tensor) and value.is_nested:
        nested: Any = value
        if value.layout != torch.jagged or nested._ragged_idx != 1 or nested.lengths() is not None:
            raise TypeError(
                "a nested tensor has to have layout torch.jagged, its rows ragged in dim 1 and without "
                "holes, to be placed row by row"
            )
        field = JaggedTensor(values=nested.values(), lengths=nested.offsets().diff())
    part_tensors = (field,) if isinstance(field, torch.Tensor) else (field.values(), field.weights_or_none())
    for part in part_tensors:
        if part is not None:
            _check_tensor(part)
    return field


def like(field: FieldValue, leaf: Any) -> Any:
    """Returns a field as the kind of leaf that `leaf` is; the inverse of `as_field`."""
    if isinstance(leaf, KeyedTensor):
        return KeyedTensor(leaf.keys(), leaf.length_per_key(), field)
    if isinstance(leaf, torch.Tensor) and leaf.is_nested and isinstance(field, JaggedTensor):
        return torch.nested.nested_tensor_from_jagged(field.values(), field.offsets())
    return field


def pin_leaf(leaf: Any) -> Any:
    """Returns a leaf in pinned host memory."""
    if isinstance(leaf, JaggedTensor):  # has no pin_memory of its own
        parts = {"values": leaf.values(), "lengths": leaf.lengths(), "weights": leaf.weights_or_none()}
        return with_parts(
            leaf, **{name: part.pin_memory() for name, part in parts.items() if part is not None}
        )
    return like(leaf.values().pin_memory(), leaf) if isinstance(leaf, KeyedTensor) else leaf.pin_memory()


def _check_type(leaf: Leaf) -> None:
    """Refuses what would arrive without a part of it."""
    if type(leaf) not in _EXACT_TYPES and not (isinstance(leaf, torch.Tensor) and leaf.is_nested):
        plain = next(of for of in _EXACT_TYPES if isinstance(leaf, of)).__name__
        raise TypeError(
            f"a {type_name(leaf)} would arrive as a {plain}, without what the subclass adds; make it a "
            f"{plain}, and what else it holds fields of their own"
        )
    if isinstance(leaf, KeyedJaggedTensor) and leaf.inverse_indices_or_none() is not None:
        raise TypeError(
            "a KeyedJaggedTensor has inverse_indices, which refer to rows of this batch alone; leave them "
            "out, and deduplicate after the exchange"
        )


def _check_tensor(tensor: torch.Tensor) -> None:
    """Refuses tensors whose rows cannot be sent as bytes."""
    _check_type(tensor)
    if tensor.layout != torch.strided:
        raise TypeError(f"a tensor has layout {tensor.layout}, of which rows cannot be sent; make it dense")
    if tensor.dtype in _REFUSED_DTYPES:
        raise TypeError(
            f"a tensor has dtype {tensor.dtype}, of which rows cannot be sent; send quantized values as "
            "integers of at least 8 bits (int_repr), next to their scale"
        )
