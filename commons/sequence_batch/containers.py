"""Batches of any type as trees, whose leaves are tensors.

Dataclasses, named tuples, tuples, lists, dicts and TensorDicts may be nested in any way. Other types are
added by `register_batch_type`. A leaf is named by its path, as in `sparse.ids`, `[0].lengths` or
`['user/age']`: attributes and keys that are identifiers follow a dot, all others are in brackets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import NonTensorStack

from .batch_leaves import Leaf, as_field, field_name, like, pin_leaf
from .container_types import (
    TAKE_APART,
    Parts,
    container_type,
    is_plain,
    join_path,
    replace_dataclass,
    type_name,
)
from .row_schema import FieldValue

Batch = TypeVar("Batch")
_PLAINEST = frozenset({type(None), bool, int, float, str})  # skipped without a look


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
    container = container_type(value)
    if container is not None:
        for key, part in container.parts(value).items():
            if type(part) not in _PLAINEST and key not in container.shared:
                yield from leaves(part, shared, join_path(path, key))
    elif path and not is_plain(value):
        raise TypeError(
            f"{path} is a {type_name(value)}, which would stay behind when its samples move: {_remedy(value)}"
        )


def transform(
    value: Any, function: Callable[[str, Leaf], Any], path: str = "", values: Parts | None = None
) -> Any:
    """Returns the batch with every leaf, shared ones too, replaced by `function(path, leaf)`.

    Containers without a changed leaf are kept as they are. `values` replace parts of the outermost container.
    """
    if isinstance(value, Leaf):
        return function(path, value)
    container = container_type(value)
    if container is None:
        return value
    changed = {
        key: new
        for key, part in container.parts(value).items()
        if type(part) not in _PLAINEST
        and (new := transform(part, function, join_path(path, key))) is not part
    }
    changed.update(values or {})
    return container.replaced(value, changed) if changed else value


def paths(value: Any, path: str = "") -> set[str]:
    """Returns the paths of all containers and leaves in a batch."""
    container = None if isinstance(value, Leaf) else container_type(value)
    parts = {} if container is None else container.parts(value)
    below = (paths(part, join_path(path, key)) for key, part in parts.items())
    return set().union(*below) | ({path} if path else set())


def check_replaceable(value: Any, path: str = "") -> None:
    """Checks that rebuilding the containers in a batch, as every move does, changes and leaves out nothing.

    Raises:
        TypeError: an `__init__` or `__post_init__` would change something, or a tensor is an attribute that
            is no part of its container.
    """
    container = None if isinstance(value, Leaf) else container_type(value)
    if container is None:
        return
    parts, again = container.parts(value), None
    if container.replaced is replace_dataclass:
        again = replace_dataclass(value, {})
        parts_again = container.parts(again)
        for key, part in parts.items():
            if not _is_same(parts_again[key], part):
                raise TypeError(
                    f"{join_path(path, key)} changes when dataclasses.replace makes a {type_name(value)} "
                    "again, as moving its samples does; change it before the batch is made, not in "
                    f"__init__ or __post_init__, or {TAKE_APART}"
                )
    if again is not None or isinstance(value, dict | list | tuple):
        for name, attribute in getattr(value, "__dict__", {}).items():
            is_kept = hasattr(again, name) or attribute is parts.get(name)
            if isinstance(attribute, Leaf) and not is_kept:
                raise TypeError(
                    f"{join_path(path, name)} is a tensor that would stay behind when its samples move, "
                    f"because it is only an attribute of a {type_name(value)}: make it a field or an "
                    f"element, or {TAKE_APART}"
                )
    for key, part in parts.items():
        check_replaceable(part, join_path(path, key))


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

    return transform(batch, replaced, values=values)


def move_to(batch: Batch, device: torch.device, non_blocking: bool = False) -> Batch:
    """Returns a batch of any type with every tensor on `device`."""
    return transform(batch, lambda _, leaf: leaf.to(device=device, non_blocking=non_blocking))


def pin(batch: Batch) -> Batch:
    """Returns the batch with every tensor in pinned host memory."""
    return transform(batch, lambda _, leaf: pin_leaf(leaf))


def record_stream(batch: Any, stream: torch.Stream) -> None:
    """Tells the allocator that `stream` uses the batch's tensors."""

    def record(_: str, leaf: Any) -> Any:
        nested = isinstance(leaf, torch.Tensor) and leaf.is_nested
        for part in (leaf.values(), leaf.offsets()) if nested else (leaf,):
            part.record_stream(stream)
        return leaf

    transform(batch, record)


def _is_same(again: Any, value: Any) -> bool:
    """Returns whether a part is as it was. A new tensor is not: with other values it might differ."""
    if again is value:
        return True
    has_none = is_plain(value) or (isinstance(value, list | tuple | dict) and not any(leaves(value)))
    return has_none and type(again) is type(value) and again == value


def _remedy(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "make it a tensor, or name it in the shuffler's shared_fields if all samples share it"
    if isinstance(value, NonTensorStack):
        return "it has a value that is no tensor for each row; make it a tensor"
    return f"{TAKE_APART}, or name it in the shuffler's shared_fields if all samples share it"
