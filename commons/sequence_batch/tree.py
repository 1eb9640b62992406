"""Trees of batches of any type, with tensors as leaves.

Dataclasses, named tuples, tuples, lists and dicts may be nested in any way. `register_batch_type` adds other
types. The name of a part is its path, such as `sparse.ids`, `[0].lengths` or `['user/age']`. Attributes and
keys that are identifiers follow a dot, and all other keys are in brackets.

`take_apart` walks over a batch once. The library then reads the tree rather than the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch

from .container_types import (
    DECLARE_SHARED,
    MORE_KINDS,
    SEQUENCE,
    TAKE_APART,
    Batch,
    ContainerType,
    container_type,
    is_cached_property,
    is_of_more_kinds,
    is_plain,
    join_path,
    type_name,
)
from .leaf_fields import Leaf, check_leaf
from .row_schema import FieldValue

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
        return self.container is None and isinstance(self.value, Leaf)

    @property
    def needs_import(self) -> bool:
        """Whether the part is of a type that an extension would take apart, and that is not imported."""
        return self.container is None and is_of_more_kinds(type(self.value))  # type: ignore[arg-type]

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
    """
    is_shared = is_shared or path in shared
    container = container_type(value)
    if container is None:
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
        TypeError: `check_leaf` refuses a leaf, a value may hold data of samples that would stay behind, or a
            part is of a type that an extension would take apart.
    """
    fields = {}
    for part in tree.each():
        if part.needs_import:
            raise TypeError(f"{part.path or 'the batch'} is a {type_name(part.value)}: {MORE_KINDS}")
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


def paths(tree: Part) -> set[str]:
    """Returns the paths of all parts of a batch."""
    return {part.path for part in tree.each() if part.path}


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
                f"{join_path(part.path, key)} changes when a {type_name(part.value)} is rebuilt, as moving its "
                "samples does: change it before the batch is made, not in __init__ or __post_init__, or make "
                f"it a field that __init__ takes, or {TAKE_APART}"
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
    """Returns every part that is a leaf, an array, or what an extension would take apart, also if shared."""
    every = tree.each(without)
    return [of for of in every if of.is_leaf or of.needs_import or isinstance(of.value, np.ndarray)]


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
