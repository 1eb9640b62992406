"""Trees of batches of any type, with tensors as leaves.

Dataclasses, named tuples, tuples, lists and dicts may be nested in any way. `register_batch_type` adds other
types. The name of a part is its path, such as `sparse.ids`, `[0].lengths` or `['user/age']`. Attributes and
keys that are identifiers follow a dot, and all other keys are in brackets.

`take_apart` walks over a batch once. The library then reads the tree rather than the batch. An exchange sends
only tensors. It treats plain values as shared, such as the names of features. It refuses a list of them that
has an entry per row and differs between ranks.
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
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from .. import NAME
from .fields import DECLARE_SHARED, MORE_KINDS, TAKE_APART, FieldValue, check_leaf, type_name

Batch = TypeVar("Batch")
Parts: TypeAlias = Mapping[Hashable, Any]
PlainList: TypeAlias = list | tuple | range | dict

# Types whose values belong to no single sample. All samples share them.
_PLAIN = (
    *(type(None), numbers.Number, np.generic, str, bytes, enum.Enum, pathlib.PurePath),
    *(range, slice, datetime.date, datetime.timedelta, torch.Size),
    *(type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device),
)


class ContainerType(NamedTuple):
    """The functions that take containers of one type apart by key, and rebuild them with some parts replaced.

    All samples share the parts with keys in `shared`. If the type `is_registered`, a user or an extension
    gave the functions, which then know all attributes.
    """

    parts: Callable[[Any], Parts]
    replaced: Callable[[Any, Parts], Any]
    shared: frozenset[str] = frozenset()
    is_registered: bool = False


_REGISTERED: dict[type, ContainerType] = {}


def register_batch_type(
    batch_type: type[Batch], parts: Callable[[Batch], Parts], replaced: Callable[[Batch, Parts], Batch]
) -> None:
    """Registers functions that take apart and rebuild the instances of a type and of its subclasses.

    Provisional: may change in a minor version.

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
    container_of.cache_clear()


@functools.cache
def container_of(of: Any) -> ContainerType | None:
    """Returns how containers of a type are taken apart, or None if its values are not containers."""
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
    more_kinds = ("KeyedTensor", "NestedTensor", "tensordict")
    return not names.isdisjoint(more_kinds) or hasattr(of, "_is_tensorclass")


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


def _replace_mapping(value: Any, parts: Parts) -> Any:
    if isinstance(value, dict) or hasattr(value, "__copy__"):
        made = copy.copy(value)
    else:  # copy.copy would share the attribute that holds the items; the memo keeps the items uncopied
        made = copy.deepcopy(value, {id(part): part for part in value.values()})
    for key, part in parts.items():  # `update` may merge into nested dicts, which both containers share
        made[key] = part
    attributes = getattr(made, "__dict__", {})
    for name in [name for name in attributes if _is_cached(type(made), name)]:
        del attributes[name]  # it was computed from other rows
    attributes.update({key: parts[key] for key in parts if attributes.get(key) is value[key]})
    return made


def _is_cached(of: type, name: str) -> bool:
    """Returns whether an attribute of a type is a cached property."""
    return isinstance(inspect.getattr_static(of, name, None), functools.cached_property)


def _replace_sequence(value: Any, parts: Parts) -> Any:
    try:
        return type(value)([parts.get(number, element) for number, element in enumerate(value)])
    except TypeError as error:
        raise TypeError(f"{type_name(value)} cannot be made of a list of elements; {TAKE_APART}") from error


_MAPPING = ContainerType(dict, _replace_mapping)
SEQUENCE = ContainerType(lambda value: dict(enumerate(value)), _replace_sequence)
_NAMED_TUPLE = ContainerType(
    lambda value: value._asdict(),
    lambda value, parts: value._replace(**{str(name): of for name, of in parts.items()}),
)


# True while containers are rebuilt from parts that were checked when the batch was made.
is_rebuilding: ContextVar[bool] = ContextVar("is_rebuilding", default=False)
_PLAINEST = frozenset({type(None), bool, int, float, str})


class Part(NamedTuple):
    """A part of a batch, or a whole batch, whose path is empty.

    A part does not travel if all samples share it, because it, or one that contains it, is declared so.
    Leaves and values that cannot be taken apart have no container. Lists of numbers and texts have no parts.
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

    def rebuilt(self, new: Mapping[str, Any]) -> Any:
        """Returns the batch with the parts at the paths in `new` replaced. Unchanged containers are kept."""
        if self.path in new:
            is_flat = isinstance(self.value, torch.Tensor) and self.value.dim() == 1  # as labels may be
            return new[self.path].flatten() if is_flat else new[self.path]
        made = {key: part.rebuilt(new) for key, part in self.parts.items()}
        changed = {key: part for key, part in made.items() if part is not self.parts[key].value}
        if self.container is None or not changed:
            return self.value
        token = is_rebuilding.set(True)
        try:
            return self.container.replaced(self.value, changed)
        finally:
            is_rebuilding.reset(token)

    def fields(self) -> dict[str, FieldValue]:
        """Returns the leaves that travel with samples, by path.

        Raises:
            TypeError: `check_leaf` refuses a leaf, or a value may hold data of samples.
        """
        fields = {}
        for part in self.each():
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
                    f"{part.path} is a {type_name(part.value)}, which would stay behind when its samples "
                    f"move: {remedy}, or declare what all samples share: {DECLARE_SHARED}"
                )
        return fields

    def tensors_and_arrays(self, without: Collection[int] = ()) -> list[Part]:
        """Returns every part that is a leaf or an array, also if shared."""
        return [of for of in self.each(without) if of.is_leaf or isinstance(of.value, np.ndarray)]

    def check_replaceable(self) -> None:
        """Raises a TypeError if a container, rebuilt as in every move, fails, changes, or loses something."""
        self.check_attributes()
        for part in self.each():
            if part.container is None or part.container.is_registered or not part.tensors_and_arrays():
                continue
            again = part.container.replaced(part.value, {})
            parts, kept = part.container.parts(again), _attributes(again)
            # A new tensor counts as changed: it may depend on the rows.
            changed = [
                key
                for key, value in part.container.parts(part.value).items()
                if parts[key] is not value and (take_apart(value).tensors_and_arrays() or parts[key] != value)
            ]
            for key in [*changed, *(name for name in _attributes(part.value) if name not in kept)]:
                raise TypeError(
                    f"{join_path(part.path, key)} changes when a {type_name(part.value)} is rebuilt, as "
                    "moving its samples does: change it before the batch is made, not in __init__ or "
                    f"__post_init__, or make it a field that __init__ takes, or {TAKE_APART}"
                )

    def check_attributes(self) -> None:
        """Raises a TypeError if a container holds a tensor or array only as an attribute, which never moves.

        A later batch may fail even if the first passed.
        """
        for part, name, attribute in self._held_in_attributes():
            inside = {id(below.value) for below in part.each()}
            for lost in take_apart(attribute, path=join_path(part.path, name)).tensors_and_arrays(inside):
                kind = "an array" if isinstance(lost.value, np.ndarray) else "a tensor"
                raise TypeError(
                    f"{lost.path} is {kind} that would stay behind when its samples move, because it is "
                    f"only an attribute of a {type_name(part.value)}: make it a field or an element, or "
                    f"{TAKE_APART}"
                )

    def _held_in_attributes(self) -> Iterator[tuple[Part, str, Any]]:
        """Yields (owner, name, value) of all `_attributes` of containers of types that are not registered."""
        for part in self.each():
            if part.container and not part.container.is_registered:
                yield from ((part, *attribute) for attribute in _attributes(part.value).items())

    def facts(self) -> dict[str, Any]:
        """Returns the plain values of a batch that are not declared as shared, by path.

        `{"x": x, "max_len": 20, "names": ["a", "b"]}` has `max_len` and `names`. A dict of plain values with
        numeric keys counts as a list, because the keys may be numbers of samples.
        """
        if self.is_shared or isinstance(self.value, torch.device):  # ranks differ in their devices
            return {}
        is_whole = self.container is None or self._may_be_list
        if is_whole and all(below.container is not None or is_plain(below.value) for below in self.each()):
            return {self.path: self.value}
        return {path: fact for part in self.parts.values() for path, fact in part.facts().items()}

    def facts_in_attributes(self) -> dict[str, Any]:
        """Returns the plain values that only attributes of containers hold, by path."""
        found: dict[str, Any] = {}
        for owner, name, attribute in self._held_in_attributes():
            has_entries = is_list(attribute) and len(attribute) > 0
            is_part = has_entries and any(attribute is part.value for part in owner.each())
            if (has_entries or (is_plain(attribute) and not name.startswith("_"))) and not is_part:
                found |= take_apart(attribute, path=join_path(owner.path, name)).facts()
        return found

    def check_no_samples(self, num_rows: int | None = None) -> None:
        """Raises a TypeError if a list of `tensor_lists` may hold samples: if it has an entry for each row.

        Without `num_rows`, any list may: an error must not depend on how many rows a rank happens to have.
        """
        found = {path: of for path, of in self.tensor_lists().items() if num_rows in (None, len(of))}
        for path, entries in found.items():
            of = f", in a batch of {num_rows} rows" if num_rows else ""
            raise TypeError(
                f"{path or 'the batch'} is a {type_name(entries)} of {len(entries)} similar entries{of}: "
                "they may be fields or samples. Make it a tuple, or a dict with names, if they are fields. "
                "If they are samples, collate them to tensors with a row each, or divide them by parts = "
                f"{NAME}.partition.refined(costs, n); [[samples[i] for i in part] for part in parts]"
            )

    def tensor_lists(self) -> dict[str, Any]:
        """Returns lists, and dicts with numeric keys, of two or more alike entries with tensors, by path.

        Entries that differ in their types, dtypes or dimensions are fields, and so are entries of tuples.
        """
        found = {}
        for part in self.each():
            if part._may_be_list and not (isinstance(part.value, tuple) or part.is_shared):
                kinds = {tuple(_kind_of(below.value) for below in of.each()) for of in part.parts.values()}
                if len(kinds) == 1 < len(part.parts) and part.tensors_and_arrays():
                    found[part.path] = part.value
        return found

    @property
    def _may_be_list(self) -> bool:
        """Whether a part's entries have numbers rather than names."""
        if isinstance(self.value, dict) and self.value:
            return all(isinstance(key, int | np.integer) or str(key).isdigit() for key in self.value)
        return self.container is SEQUENCE


def take_apart(value: Any, shared: Collection[str] = (), path: str = "", is_shared: bool = False) -> Part:
    """Returns the tree of a batch, or of the part of a batch at `path`.

    All samples share the parts at the paths in `shared`, and dataclass fields that are marked
    `metadata={"per_sample": False}`. With `is_shared`, they share all of `value`. Raises a TypeError if only
    an extension that is not imported takes a part apart.
    """
    is_shared = is_shared or path in shared
    container = container_of(type(value))  # type: ignore[arg-type]
    if container is None:
        if _is_of_more_kinds(type(value)):  # type: ignore[arg-type]
            raise TypeError(f"{path or 'the batch'} is a {type_name(value)}: {MORE_KINDS}")
        return Part(path, value, is_shared, None, {})
    contents = container.parts(value)
    if container is SEQUENCE and all(type(entry) in _PLAINEST for entry in contents.values()):
        contents = {}  # a long list of texts is walked over in no time
    parts = {
        key: take_apart(part, shared, join_path(path, key), is_shared or key in container.shared)
        for key, part in contents.items()
    }
    return Part(path, value, is_shared, container, parts)


def transform(batch: Batch, function: Callable[[Any], Any]) -> Batch:
    """Returns the batch with every leaf, including shared ones, replaced by `function(leaf)`."""
    tree = take_apart(batch)
    return tree.rebuilt({part.path: function(part.value) for part in tree.each() if part.is_leaf})


def move_to(batch: Batch, device: torch.device, non_blocking: bool = False) -> Batch:
    """Returns a batch of any type with every tensor on `device`.

    Provisional: may change in a minor version.
    """
    return transform(batch, lambda leaf: leaf.to(device=device, non_blocking=non_blocking))


def _attributes(value: Any) -> dict[str, Any]:
    """Returns an object's attributes in `__dict__` and slots, by name, except for its fields, its cached
    properties, and attributes that the exchange sets (`set_by_exchange` of its type)."""
    known = {spec.name for spec in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    known.update(getattr(type(value), "set_by_exchange", ()))
    slots = [getattr(of, "__slots__", ()) for of in type(value).__mro__]
    names = [name for of in slots for name in ((of,) if isinstance(of, str) else of)]
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}
    held |= getattr(value, "__dict__", {})
    return {name: of for name, of in held.items() if not (name in known or _is_cached(type(value), name))}


def is_list(fact: Any) -> bool:
    """Returns whether a plain value is a list that may have an entry per row."""
    return isinstance(fact, PlainList) and not isinstance(fact, torch.Size)


def _kind_of(value: Any) -> Any:
    is_dense = isinstance(value, torch.Tensor | np.ndarray)
    return (type(value), value.dtype, value.ndim) if is_dense else type(value)
