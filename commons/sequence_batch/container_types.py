"""The types of containers that batches are made of, and how to take them apart and rebuild them."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import functools
import inspect
import numbers
import pathlib
import types
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from .. import NAME

Batch = TypeVar("Batch")
Parts: TypeAlias = Mapping[Hashable, Any]

# Types whose values belong to no single sample. All samples share them.
_PLAIN = (
    *(type(None), numbers.Number, np.generic, str, bytes, enum.Enum, pathlib.PurePath),
    *(range, slice, datetime.date, datetime.timedelta, torch.Size),
    *(type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device),
)
TAKE_APART = f"take it apart with {NAME}.sequence_batch.register_batch_type"
MORE_KINDS = (
    f"import {NAME}.extensions.more_kinds, for TensorDicts, KeyedTensors and jagged nested tensors, or "
    f"{TAKE_APART}"
)
_OF_MORE_KINDS = ("KeyedTensor", "NestedTensor", "tensordict")
DECLARE_SHARED = (
    'mark a field of a dataclass with field(metadata={"per_sample": False}); for any other batch, name it in '
    "the shuffler's shared_fields"
)


class ContainerType(NamedTuple):
    """The functions that take containers of one type apart and rebuild them.

    Attributes:
        parts: function that returns the parts of a container, by key.
        replaced: function that returns a container like the given one, with the given parts replaced.
        shared: keys of the parts that all samples share.
        is_registered: whether a user or an extension gave the functions, which then know all attributes.
    """

    parts: Callable[[Any], Parts]
    replaced: Callable[[Any, Parts], Any]
    shared: frozenset[str] = frozenset()
    is_registered: bool = False


_REGISTERED: dict[type, ContainerType] = {}


def register_batch_type(
    batch_type: type[Batch],
    parts: Callable[[Batch], Parts],
    replaced: Callable[[Batch, Parts], Batch],
) -> None:
    """Registers functions that take apart and rebuild the instances of a type and of its subclasses.

    Args:
        batch_type: type of a batch, or of a part of one.
        parts: function that returns all parts of an instance, by name. Parts may be containers themselves.
        replaced: function that returns a new instance, with the given parts in place of the instance's own.

    Raises:
        TypeError: `batch_type` is not a type.
    """
    if not isinstance(batch_type, type):
        raise TypeError(f"register_batch_type got {batch_type!r}, expected a class")
    _REGISTERED[batch_type] = ContainerType(parts, replaced, is_registered=True)
    _container_of.cache_clear()


def container_type(value: Any) -> ContainerType | None:
    """Returns the container type of a value, or None if the value is not a container."""
    return _container_of(type(value))  # type: ignore[arg-type]


@functools.cache
def _container_of(of: type) -> ContainerType | None:
    for base in of.__mro__:
        if base in _REGISTERED:
            return _REGISTERED[base]
    if of is torch.Size or is_of_more_kinds(of):
        return None
    if dataclasses.is_dataclass(of):
        fields = dataclasses.fields(of)
        shared = frozenset(spec.name for spec in fields if not spec.metadata.get("per_sample", True))
        return ContainerType(_dataclass_parts, _replace_dataclass, shared)
    if issubclass(of, MutableMapping):
        return _MAPPING
    if issubclass(of, tuple) and hasattr(of, "_asdict"):
        return _NAMED_TUPLE
    return SEQUENCE if issubclass(of, list | tuple) else None


@functools.cache
def is_of_more_kinds(of: Any) -> bool:
    """Returns whether only an extension takes a type apart: KeyedTensor, nested tensors, and tensordict."""
    names = {name for base in of.__mro__ for name in (base.__name__, base.__module__.partition(".")[0])}
    return not names.isdisjoint(_OF_MORE_KINDS) or hasattr(of, "_is_tensorclass")


def is_plain(value: Any) -> bool:
    """Returns whether a value is of a type that holds no data of single samples."""
    if isinstance(value, set | frozenset):
        return all(is_plain(element) for element in value)
    return isinstance(value, _PLAIN)


def join_path(path: str, key: Hashable) -> str:
    """Returns the path of a part of the container at `path`."""
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def type_name(value: Any) -> str:
    """Returns the name of a value's type, including the module unless the type is a builtin."""
    of = type(value)
    return of.__qualname__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__qualname__}"


def _replace_dataclass(value: Any, parts: Parts) -> Any:
    given = {spec.name for spec in dataclasses.fields(value) if spec.init}
    if set(_signature(type(value)).parameters) != given:  # type: ignore[arg-type]
        raise TypeError(
            f"{type_name(value)} cannot be rebuilt by dataclasses.replace: its __init__ takes something "
            f"other than its fields; {TAKE_APART}"
        )
    return dataclasses.replace(value, **{str(name): part for name, part in parts.items()})


_signature = functools.cache(inspect.signature)


def _dataclass_parts(value: Any) -> Parts:
    return {spec.name: getattr(value, spec.name, None) for spec in dataclasses.fields(value)}


def _mapping_parts(value: Mapping) -> Parts:
    shown = Counter(join_path("", key) for key in value)
    for key in [key for key, count in shown.items() if count > 1]:
        raise TypeError(
            f"a {type_name(value)} has two keys that both show as {key}, so that their fields cannot be told "
            "apart; give it keys of different texts"
        )
    return dict(value)


def _replace_mapping(value: Any, parts: Parts) -> Any:
    if isinstance(value, dict) or hasattr(value, "__copy__"):
        made = copy.copy(value)
    else:  # copy.copy would share the attribute that holds the items; the memo keeps the items uncopied
        made = copy.deepcopy(value, {id(part): part for part in value.values()})
    for key, part in parts.items():  # `update` may merge into nested dicts, which both containers share
        made[key] = part
    attributes = getattr(made, "__dict__", {})
    for name in [name for name in attributes if is_cached_property(type(made), name)]:
        del attributes[name]  # it was computed from other rows
    attributes.update({key: parts[key] for key in parts if attributes.get(key) is value[key]})
    return made


def is_cached_property(of: type, name: str) -> bool:
    """Returns whether an attribute of a type is a cached property."""
    return isinstance(inspect.getattr_static(of, name, None), functools.cached_property)


def _replace_sequence(value: Any, parts: Parts) -> Any:
    try:
        return type(value)([parts.get(number, element) for number, element in enumerate(value)])
    except TypeError as error:
        raise TypeError(f"{type_name(value)} cannot be made of a list of elements; {TAKE_APART}") from error


_MAPPING = ContainerType(_mapping_parts, _replace_mapping)
SEQUENCE = ContainerType(lambda value: dict(enumerate(value)), _replace_sequence)
_NAMED_TUPLE = ContainerType(
    lambda value: value._asdict(),
    lambda value, parts: value._replace(**{str(name): of for name, of in parts.items()}),
)
