"""Trees of batches of any type, with tensors as leaves.

Dataclasses, named tuples, tuples, lists and dicts may be nested in any way. `register_batch_type` adds other
types. The name of a part is its path, such as `sparse.ids`, `[0].lengths` or `['user/age']`. Attributes and
keys that are identifiers follow a dot, and all other keys are in brackets.

`take_apart` walks over a batch once. The library then reads the tree rather than the batch.
"""

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
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from .row_schema import DECLARE_SHARED, MORE_KINDS, TAKE_APART, FieldValue, check_leaf, type_name

Batch = TypeVar("Batch")
Parts: TypeAlias = Mapping[Hashable, Any]

# Types whose values belong to no single sample. All samples share them.
_PLAIN = (
    *(type(None), numbers.Number, np.generic, str, bytes, enum.Enum, pathlib.PurePath),
    *(range, slice, datetime.date, datetime.timedelta, torch.Size),
    *(type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device),
)
_OF_MORE_KINDS = ("KeyedTensor", "NestedTensor", "tensordict")


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
    if of is torch.Size or _is_of_more_kinds(of):
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
def _is_of_more_kinds(of: Any) -> bool:
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


_NOTHING: Mapping[Any, Any] = {}
# True while containers are rebuilt from parts that were checked when the batch was made.
is_rebuilding: ContextVar[bool] = ContextVar("is_rebuilding", default=False)
_PLAINEST = frozenset({type(None), bool, int, float, str})


class Part(NamedTuple):
    """A part of a batch, or a whole batch.

    Attributes:
        path: path in the batch, empty for the batch itself.
        value: the part itself.
        is_shared: whether all samples share the part, so that it does not travel. The part, or one that
            contains it, is declared as shared.
        container: container type of the part. None means a leaf, or a value that cannot be taken apart.
        parts: parts within this one, by key. A list of numbers and texts has none.
    """

    path: str
    value: Any
    is_shared: bool
    container: ContainerType | None
    parts: Mapping[Hashable, Part]

    @property
    def is_leaf(self) -> bool:
        """Whether the part is a tensor or a jagged tensor, unless its type is registered."""
        return self.container is None and isinstance(self.value, FieldValue)

    def each(self, without: Collection[int] = ()) -> Iterator[Part]:
        """Yields this part and all parts below it, but none below a value whose `id` is in `without`."""
        if id(self.value) not in without:
            yield self
            for part in self.parts.values():
                yield from part.each(without)


def take_apart(value: Any, shared: Collection[str] = (), path: str = "", is_shared: bool = False) -> Part:
    """Returns the tree of a batch.

    Args:
        value: batch, or the part of a batch that `path` names.
        shared: paths of the parts that all samples share. Dataclass fields that are marked
            `metadata={"per_sample": False}` are shared as well.
        path: path of `value` in its batch.
        is_shared: whether all samples share `value`.

    Raises:
        TypeError: a part is of a type that an extension takes apart, and that is not imported.
    """
    is_shared = is_shared or path in shared
    container = container_type(value)
    if container is None:
        if _is_of_more_kinds(type(value)):  # type: ignore[arg-type]
            raise TypeError(f"{path or 'the batch'} is a {type_name(value)}: {MORE_KINDS}")
        return Part(path, value, is_shared, None, _NOTHING)
    contents = container.parts(value)
    if container is SEQUENCE and all(type(entry) in _PLAINEST for entry in contents.values()):
        contents = _NOTHING  # a long list of texts is walked over in no time
    parts = {
        key: take_apart(part, shared, join_path(path, key), is_shared or key in container.shared)
        for key, part in contents.items()
    }
    return Part(path, value, is_shared, container, parts)


def rebuild(tree: Part, new: Mapping[str, Any]) -> Any:
    """Returns the batch with the parts at the paths in `new` replaced. Unchanged containers are kept."""
    if tree.path in new:
        is_flat = isinstance(tree.value, torch.Tensor) and tree.value.dim() == 1
        return new[tree.path].flatten() if is_flat else new[tree.path]  # labels of a `BaseBatch` may be flat
    made = {key: rebuild(part, new) for key, part in tree.parts.items()}
    changed = {key: part for key, part in made.items() if part is not tree.parts[key].value}
    if tree.container is None or not changed:
        return tree.value
    token = is_rebuilding.set(True)
    try:
        return tree.container.replaced(tree.value, changed)
    finally:
        is_rebuilding.reset(token)


def transform(batch: Batch, function: Callable[[Any], Any]) -> Batch:
    """Returns the batch with every leaf, including shared ones, replaced by `function(leaf)`."""
    tree = take_apart(batch)
    return rebuild(tree, {part.path: function(part.value) for part in tree.each() if part.is_leaf})


def move_to(batch: Batch, device: torch.device, non_blocking: bool = False) -> Batch:
    """Returns a batch of any type with every tensor on `device`."""
    return transform(batch, lambda leaf: leaf.to(device=device, non_blocking=non_blocking))


def fields_of(tree: Part) -> dict[str, FieldValue]:
    """Returns the leaves that travel with samples, by path.

    Raises:
        TypeError: `check_leaf` refuses a leaf, or a value may hold data of samples that would stay behind.
    """
    fields = {}
    for part in tree.each():
        if part.is_shared:
            continue
        if part.is_leaf:
            try:
                check_leaf(part.value)
            except TypeError as error:
                raise TypeError(f"{part.path}: {error}") from error
            fields[part.path] = part.value
        elif part.container is None and part.path and not is_plain(part.value):
            remedy = "make it a tensor" if isinstance(part.value, np.ndarray) else TAKE_APART
            raise TypeError(
                f"{part.path} is a {type_name(part.value)}, which would stay behind when its samples move: "
                f"{remedy}, or declare what all samples share: {DECLARE_SHARED}"
            )
    return fields


def check_replaceable(tree: Part) -> None:
    """Checks that rebuilding a batch's containers, as every move does, neither changes nor loses anything.

    Raises:
        TypeError: a container cannot be rebuilt, or is not the same again, or `check_attributes` fails.
    """
    check_attributes(tree)
    for part in tree.each():
        if part.container is None or part.container.is_registered or not tensors_and_arrays(part):
            continue
        again = part.container.replaced(part.value, {})
        parts, kept = part.container.parts(again), dict(_attributes(again))
        # A new tensor counts as changed: it may depend on the rows.
        changed = [
            key
            for key, value in part.container.parts(part.value).items()
            if parts[key] is not value and (tensors_and_arrays(take_apart(value)) or parts[key] != value)
        ]
        for key in [*changed, *(name for name, _ in _attributes(part.value) if name not in kept)]:
            raise TypeError(
                f"{join_path(part.path, key)} changes when a {type_name(part.value)} is rebuilt, as moving "
                "its samples does: change it before the batch is made, not in __init__ or __post_init__, or "
                f"make it a field that __init__ takes, or {TAKE_APART}"
            )


def check_attributes(tree: Part) -> None:
    """Checks that no container holds a tensor or array only as an attribute, which no move would take along.

    A later batch may fail even if the first passed.

    Raises:
        TypeError: a container has such an attribute.
    """
    for part, name, attribute in held_in_attributes(tree):
        inside = {id(below.value) for below in part.each()}
        for lost in tensors_and_arrays(take_apart(attribute, path=join_path(part.path, name)), inside):
            kind = "an array" if isinstance(lost.value, np.ndarray) else "a tensor"
            raise TypeError(
                f"{lost.path} is {kind} that would stay behind when its samples move, because it is only an "
                f"attribute of a {type_name(part.value)}: make it a field or an element, or {TAKE_APART}"
            )


def held_in_attributes(tree: Part) -> Iterator[tuple[Part, str, Any]]:
    """Yields (owner, name, value) for all `_attributes` of a batch's containers of types not registered."""
    for part in tree.each():
        if part.container and not part.container.is_registered:
            yield from ((part, name, attribute) for name, attribute in _attributes(part.value))


def tensors_and_arrays(tree: Part, without: Collection[int] = ()) -> list[Part]:
    """Returns every part that is a leaf or an array, also if shared."""
    return [of for of in tree.each(without) if of.is_leaf or isinstance(of.value, np.ndarray)]


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of an object's attributes in `__dict__` and slots, except for its fields, its
    cached properties, and attributes that the exchange sets (`set_by_exchange` of its type)."""
    known = {spec.name for spec in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    known.update(getattr(type(value), "set_by_exchange", ()))
    slots = [getattr(of, "__slots__", ()) for of in type(value).__mro__]
    names = [name for of in slots for name in ((of,) if isinstance(of, str) else of)]
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}
    for name, attribute in (held | getattr(value, "__dict__", {})).items():
        if name not in known and not is_cached_property(type(value), name):
            yield name, attribute
