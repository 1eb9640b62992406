"""Batches of any type as trees, whose leaves are tensors.

Dataclasses, named tuples, tuples, lists, dicts and TensorDicts may be nested in any way. Other types are
added by `register_batch_type`. A leaf is named by its path, as in `sparse.ids`, `[0].lengths` or
`['user/age']`: attributes and keys that are identifiers follow a dot, all others are in brackets.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import inspect
import numbers
import pathlib
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import (
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from .row_schema import FieldValue, with_parts

Batch = TypeVar("Batch")
Leaf: TypeAlias = torch.Tensor | JaggedTensor | KeyedJaggedTensor | KeyedTensor
Parts: TypeAlias = Mapping[Hashable, Any]

# Types that hold no data of single samples; all samples share their values.
_PLAIN = (
    type(None),
    bool,
    numbers.Number,
    np.generic,
    str,
    bytes,
    range,
    slice,
    enum.Enum,
    type,
    datetime.date,
    datetime.timedelta,
    pathlib.PurePath,
    types.FunctionType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.Size,
    NonTensorData,
)
_TAKE_APART = "take it apart with commons.sequence_batch.register_batch_type"
_PLAINEST = frozenset({type(None), bool, int, float, str})  # skipped without a look
# Leaves that hold nothing but what travels: subclasses may. A memory-mapped tensor arrives in memory.
_EXACT_TYPES = (torch.Tensor, MemoryMappedTensor, JaggedTensor, KeyedJaggedTensor, KeyedTensor)
# torch has no copies of these, or copies that also need what is not in the bytes.
_REFUSED_DTYPES = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4} | {
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)
}


class _ContainerType(NamedTuple):
    """How to take containers of one type apart, and to rebuild them.

    Attributes:
        parts: returns the parts of a container, by key.
        replaced: returns a container like the given one in which the given parts replace its own.
        shared: keys of parts that all samples share.
    """

    parts: Callable[[Any], Parts]
    replaced: Callable[[Any, Parts], Any]
    shared: frozenset[str] = frozenset()


_REGISTERED: dict[type, _ContainerType] = {}
_KNOWN: dict[type, _ContainerType | None] = {}  # container types of all types seen so far


def register_batch_type(
    batch_type: type[Batch],
    parts: Callable[[Batch], Parts],
    replaced: Callable[[Batch, Parts], Batch],
) -> None:
    """Registers how to take instances of a type, and of its subclasses, apart and to rebuild them.

    Args:
        batch_type: the type of a batch, or of a part of one.
        parts: returns the parts of an instance, by name; parts may be containers.
        replaced: returns a new instance in which the given parts replace those of the given instance.

    Raises:
        TypeError: `batch_type` is not a type.
    """
    if not isinstance(batch_type, type):
        raise TypeError(f"register_batch_type got {batch_type!r}, expected a class")
    _REGISTERED[batch_type] = _ContainerType(parts, replaced)
    _KNOWN.clear()


def leaves(value: Any, shared: Collection[str] = (), path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yields the path and value of each tensor, jagged or keyed tensor that travels with the samples.

    Args:
        value: a batch.
        shared: paths that all samples share; nothing below them travels. Nor do dataclass fields with
            `metadata={"per_sample": False}`.
        path: the path of `value` in its batch.

    Raises:
        TypeError: something may hold data of samples, and would stay behind when they move.
    """
    if path in shared:
        return
    if isinstance(value, Leaf):
        yield path, value
        return
    container = _container_type(value)
    if container is not None:
        for key, part in container.parts(value).items():
            if type(part) not in _PLAINEST and key not in container.shared:
                yield from leaves(part, shared, joined(path, key))
    elif path and not _is_plain(value):
        raise TypeError(
            f"{path} is a {type_name(value)}, which would stay behind when its samples move: {_remedy(value)}"
        )


def transformed(
    value: Any, function: Callable[[str, Leaf], Any], path: str = "", values: Parts | None = None
) -> Any:
    """Returns the batch with every leaf, shared ones too, replaced by `function(path, leaf)`.

    Containers without a changed leaf are kept as they are. `values` replace parts of the outermost container.
    """
    if isinstance(value, Leaf):
        return function(path, value)
    container = _container_type(value)
    if container is None:
        return value
    changed = {
        key: new
        for key, part in container.parts(value).items()
        if type(part) not in _PLAINEST and (new := transformed(part, function, joined(path, key))) is not part
    }
    changed.update(values or {})
    return container.replaced(value, changed) if changed else value


def paths(value: Any, path: str = "") -> set[str]:
    """Returns the paths of all containers and leaves in a batch."""
    container = None if isinstance(value, Leaf) else _container_type(value)
    parts = {} if container is None else container.parts(value)
    below = (paths(part, joined(path, key)) for key, part in parts.items())
    return set().union(*below) | ({path} if path else set())


def check_replaceable(value: Any, path: str = "") -> None:
    """Checks that rebuilding the containers in a batch, as every move does, changes and leaves out nothing.

    Raises:
        TypeError: an `__init__` or `__post_init__` would change something, or a tensor is an attribute that
            is no part of its container.
    """
    container = None if isinstance(value, Leaf) else _container_type(value)
    if container is None:
        return
    parts, again = container.parts(value), None
    if container.replaced is dataclass_replaced:
        again = dataclass_replaced(value, {})
        parts_again = container.parts(again)
        for key, part in parts.items():
            if not _is_same(parts_again[key], part):
                raise TypeError(
                    f"{joined(path, key)} changes when dataclasses.replace makes a {type_name(value)} again, "
                    "as moving its samples does; change it before the batch is made, not in __init__ or "
                    f"__post_init__, or {_TAKE_APART}"
                )
    if again is not None or isinstance(value, dict | list | tuple):
        for name, attribute in getattr(value, "__dict__", {}).items():
            is_kept = hasattr(again, name) or attribute is parts.get(name)
            if isinstance(attribute, Leaf) and not is_kept:
                raise TypeError(
                    f"{joined(path, name)} is a tensor that would stay behind when its samples move, because "
                    f"it is only an attribute of a {type_name(value)}: make it a field or an element, or "
                    f"{_TAKE_APART}"
                )
    for key, part in parts.items():
        check_replaceable(part, joined(path, key))


def fields_of(batch: Any, shared: Collection[str] = ()) -> dict[str, FieldValue]:
    """Returns the leaves that travel with samples, converted by `as_field`, by `field_name`.

    Raises:
        TypeError: as `leaves` and `as_field`.
    """
    fields = {}
    for path, leaf in leaves(batch, shared):
        try:
            fields[field_name(path, leaf)] = as_field(leaf)
        except TypeError as error:
            raise TypeError(f"{path}: {error}") from error
    return fields


def with_fields(batch: Batch, fields: Mapping[str, FieldValue], values: Parts | None = None) -> Batch:
    """Returns the batch with other values for some of its fields; the inverse of `fields_of`.

    Args:
        batch: the batch.
        fields: values by name, as `fields_of` returns them.
        values: other parts of the batch itself to replace, by key.
    """

    def replaced(path: str, leaf: Any) -> Any:
        name = field_name(path, leaf)
        return like(fields[name], leaf) if name in fields else leaf

    return transformed(batch, replaced, values=values)


def moved_to(batch: Batch, device: torch.device, non_blocking: bool = False) -> Batch:
    """Returns a batch of any type with every tensor on `device`."""
    return transformed(batch, lambda _, leaf: leaf.to(device=device, non_blocking=non_blocking))


def pinned(batch: Batch) -> Batch:
    """Returns the batch with every tensor in pinned host memory."""
    return transformed(batch, lambda _, leaf: _pinned(leaf))


def record_stream(batch: Any, stream: torch.Stream) -> None:
    """Tells the allocator that `stream` uses the batch's tensors."""

    def record(_: str, leaf: Any) -> Any:
        nested = isinstance(leaf, torch.Tensor) and leaf.is_nested
        for part in (leaf.values(), leaf.offsets()) if nested else (leaf,):
            part.record_stream(stream)
        return leaf

    transformed(batch, record)


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


def joined(path: str, key: Hashable) -> str:
    """Returns the path of a part of the container at `path`."""
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def type_name(value: Any) -> str:
    """Returns the name of a value's type, with its module unless it is a builtin."""
    of = type(value)
    return of.__qualname__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__qualname__}"


def dataclass_replaced(value: Any, parts: Parts) -> Any:
    """Returns a dataclass instance like `value` with some of its fields replaced.

    Raises:
        TypeError: its `__init__` takes something other than its fields, such as an InitVar.
    """
    specs = {spec.name: spec for spec in dataclasses.fields(value)}
    given = {name for name, spec in specs.items() if spec.init}
    if inspect.signature(type(value)).parameters.keys() != given:
        raise TypeError(
            f"{type_name(value)} cannot be made again by dataclasses.replace: its __init__ takes something "
            f"else than its fields; {_TAKE_APART}"
        )
    made = dataclasses.replace(value, **{str(name): part for name, part in parts.items() if name in given})
    for name in specs.keys() - given:
        part = parts.get(name, getattr(value, name, None))
        if name in parts or not _is_plain(part):
            object.__setattr__(made, name, part)  # frozen or not
    return made


def _container_type(value: Any) -> _ContainerType | None:
    if type(value) not in _KNOWN:
        _KNOWN[type(value)] = _container_of(type(value))
    return _KNOWN[type(value)]


def _container_of(of: type) -> _ContainerType | None:
    for base in of.__mro__:
        if base in _REGISTERED:
            return _REGISTERED[base]
    if issubclass(of, NonTensorData | NonTensorStack | torch.Size) or is_tensorclass(of):
        return None
    if dataclasses.is_dataclass(of):
        fields = dataclasses.fields(of)
        shared = frozenset(spec.name for spec in fields if not spec.metadata.get("per_sample", True))
        return _ContainerType(_dataclass_parts, dataclass_replaced, shared)
    if issubclass(of, TensorDictBase):
        return _TENSORDICT
    if issubclass(of, MutableMapping):
        return _DICT
    if issubclass(of, tuple) and hasattr(of, "_asdict"):
        return _NAMED_TUPLE
    return _SEQUENCE if issubclass(of, list | tuple) else None


def _is_same(again: Any, value: Any) -> bool:
    """Returns whether a part is as it was. A new tensor is not: with other values it might differ."""
    if again is value:
        return True
    has_none = _is_plain(value) or (isinstance(value, list | tuple | dict) and not any(leaves(value)))
    return has_none and type(again) is type(value) and again == value


def _is_plain(value: Any) -> bool:
    if isinstance(value, set | frozenset):
        return all(_is_plain(element) for element in value)
    return isinstance(value, _PLAIN)


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


def _remedy(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "make it a tensor, or name it in the shuffler's shared_fields if all samples share it"
    if isinstance(value, NonTensorStack):
        return "it has a value that is no tensor for each row; make it a tensor"
    return f"{_TAKE_APART}, or name it in the shuffler's shared_fields if all samples share it"


def _dataclass_parts(value: Any) -> Parts:
    return {spec.name: getattr(value, spec.name, None) for spec in dataclasses.fields(value)}


def _dict_replaced(value: Any, parts: Parts) -> Any:
    made = copy.copy(value)
    made.update(parts)
    attributes = getattr(made, "__dict__", {})
    attributes.update({key: parts[key] for key in parts if attributes.get(key) is value[key]})
    return made


def _sequence_replaced(value: Any, parts: Parts) -> Any:
    try:
        return type(value)([parts.get(number, element) for number, element in enumerate(value)])
    except TypeError as error:
        raise TypeError(f"{type_name(value)} cannot be made of a list of elements; {_TAKE_APART}") from error


def _tensordict_replaced(value: TensorDictBase, parts: Parts) -> TensorDict:
    changed = [part for part in parts.values() if isinstance(part, torch.Tensor | TensorDictBase)]
    batch_size, device = list(value.batch_size), value.device
    if changed and batch_size:
        batch_size[0] = changed[0].shape[0]
    if changed and device is not None:
        device = changed[0].device
    made = TensorDict({}, batch_size=batch_size, device=device, names=value.names if batch_size else None)
    for key, part in _tensordict_parts(value).items():
        if isinstance(part, NonTensorData):
            made.set_non_tensor(key, part.data)
        else:
            made.set(key, parts.get(key, part))
    return made.lock_() if value.is_locked else made


def _tensordict_parts(value: TensorDictBase) -> Parts:
    return {key: value.get(key) for key in value.keys()}  # noqa: SIM118  iterating it yields rows


_DICT = _ContainerType(dict, _dict_replaced)
_SEQUENCE = _ContainerType(lambda value: dict(enumerate(value)), _sequence_replaced)
_NAMED_TUPLE = _ContainerType(
    lambda value: value._asdict(),
    lambda value, parts: value._replace(**{str(name): part for name, part in parts.items()}),
)
_TENSORDICT = _ContainerType(_tensordict_parts, _tensordict_replaced)


def _pinned(leaf: Any) -> Any:
    if isinstance(leaf, JaggedTensor):  # has no pin_memory of its own
        parts = {"values": leaf.values(), "lengths": leaf.lengths(), "weights": leaf.weights_or_none()}
        return with_parts(
            leaf, **{name: part.pin_memory() for name, part in parts.items() if part is not None}
        )
    return like(leaf.values().pin_memory(), leaf) if isinstance(leaf, KeyedTensor) else leaf.pin_memory()
