"""Batches of any type as trees, whose leaves are tensors.

Dataclasses, named tuples, tuples, lists, dicts and TensorDicts may be nested in any way. Other types are
added by `register_batch_type`. A leaf is named by its path, as in `sparse.ids`, `[0].lengths` or
`['user/age']`: attributes and keys that are identifiers follow a dot, all others are in brackets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch

from .container_types import (
    TAKE_APART,
    container_type,
    is_cached_property,
    is_plain,
    join_path,
    replace_dataclass,
    type_name,
)
from .optional_types import (
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    MemoryMappedTensor,
    NonTensorStack,
)
from .row_schema import FieldValue, with_parts

Batch = TypeVar("Batch")
Leaf: TypeAlias = torch.Tensor | JaggedTensor | KeyedJaggedTensor | KeyedTensor

# Leaves that hold nothing but what travels: subclasses may. A memory-mapped tensor arrives in memory.
_EXACT_TYPES = (torch.Tensor, MemoryMappedTensor, JaggedTensor, KeyedJaggedTensor, KeyedTensor)
_NOTHING: Mapping[str, Any] = {}
DECLARE_SHARED = (
    'field(metadata={"per_sample": False}) marks a field of a dataclass; of any other batch, name it in the '
    "shuffler's shared_fields"
)
PLAINEST = frozenset({type(None), bool, int, float, str})  # skipped without a look


def leaves(value: Any, shared: Collection[str] = (), path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yields the path and value of each tensor, jagged or keyed tensor that travels with the samples.

    Nothing below the paths in `shared` travels, nor does what dataclass fields hold that are marked
    `metadata={"per_sample": False}`. `path` is that of `value` in its batch.

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
            if type(part) not in PLAINEST and key not in container.shared:
                yield from leaves(part, shared, join_path(path, key))
    elif path and not is_plain(value):
        raise TypeError(
            f"{path} is a {type_name(value)}, which would stay behind when its samples move: {_remedy(value)}"
        )


def transform(
    value: Any,
    function: Callable[[str, Any], Any],
    path: str = "",
    at: Mapping[str, Any] = _NOTHING,
    kinds: Any = Leaf,
) -> Any:
    """Returns the batch with every leaf, shared ones too, replaced by `function(path, leaf)`.

    Containers without a changed leaf are kept as they are. Parts at the paths in `at` are replaced as they
    are. `kinds` are the types of leaves.
    """
    if path in at:
        return at[path]
    container = None if isinstance(value, Leaf) else container_type(value)
    if container is None:
        return function(path, value) if isinstance(value, kinds) else value
    changed = {
        key: new
        for key, part in container.parts(value).items()
        if (at or type(part) not in PLAINEST)
        and (new := transform(part, function, join_path(path, key), at, kinds)) is not part
    }
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
        TypeError: an `__init__` or `__post_init__` would change something, or something is only an attribute:
            see `check_attributes`.
    """
    container = None if isinstance(value, Leaf) else container_type(value)
    if container is None:
        return
    parts = container.parts(value)
    if container.replaced is replace_dataclass:
        again = replace_dataclass(value, {})
        parts_again = container.parts(again)
        for key, part in parts.items():
            if not _is_same(parts_again[key], part):
                _refuse_changed(value, join_path(path, key))
        for name, attribute in attributes(value):
            # A default of the class would show again; what __post_init__ sets may be a time, say.
            is_default = hasattr(again, name) and name not in vars(again)
            if is_default and is_plain(attribute) and getattr(again, name) != attribute:
                _refuse_changed(value, join_path(path, name))
    for key, part in parts.items():
        check_replaceable(part, join_path(path, key))
    if not path:
        check_attributes(value)


def check_attributes(value: Any, path: str = "") -> None:
    """Checks that containers hold no tensor or array in an attribute alone, which no move would take along.

    A later batch may have what the first had not. Fine are attributes of a dataclass that `__post_init__`
    makes of fields, or that are private: a new instance works them out again.

    Raises:
        TypeError: one does.
    """
    container = None if isinstance(value, Leaf) else container_type(value)
    if container is None:
        return
    parts = container.parts(value)
    is_dataclass = container.replaced is replace_dataclass
    if is_dataclass or isinstance(value, MutableMapping | list | tuple):
        again = None
        for name, held, attribute in _held_alone(value, path):
            if is_dataclass:
                again = replace_dataclass(value, {}) if again is None else again
                is_private = name.startswith("_") and hasattr(again, name)
                if is_private or leaves_and_arrays(getattr(again, name, None)):
                    continue
            kind = "an array" if isinstance(attribute, np.ndarray) else "a tensor"
            raise TypeError(
                f"{held} is {kind} that would stay behind when its samples move, because it is only an "
                f"attribute of a {type_name(value)}: make it a field or an element, or {TAKE_APART}"
            )
    for key, part in parts.items():
        if type(part) not in PLAINEST:
            check_attributes(part, join_path(path, key))


def _held_alone(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yields the attribute, path and value of each tensor and array that attributes hold, and no element."""
    inside: set[int] | None = None
    for name, attribute in attributes(value):
        for held, leaf in leaves_and_arrays(attribute, join_path(path, name)):
            if inside is None:
                inside = {id(element) for _, element in leaves_and_arrays(value)}
            if id(leaf) not in inside:
                yield name, held, leaf


def _refuse_changed(value: Any, path: str) -> None:
    raise TypeError(
        f"{path} changes when dataclasses.replace makes a {type_name(value)} again, as moving its samples "
        "does; change it before the batch is made, not in __init__ or __post_init__, or make it a field, or "
        f"{TAKE_APART}"
    )


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what an object's `__dict__` and slots hold beside its fields, but what it has worked out and
    cached, and what the exchange sets (`set_by_exchange` of its type)."""
    known = {spec.name for spec in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    known.update(getattr(type(value), "set_by_exchange", ()))
    slots = [getattr(of, "__slots__", ()) for of in type(value).__mro__]
    names = [name for of in slots for name in ((of,) if isinstance(of, str) else of)]
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}
    for name, attribute in (held | getattr(value, "__dict__", {})).items():
        if name not in known and not is_cached_property(type(value), name):
            yield name, attribute


def leaves_and_arrays(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Returns every tensor, jagged or keyed tensor and array in a value, shared ones too, with its path."""
    if isinstance(value, Leaf | np.ndarray):
        return [(path, value)]
    container = container_type(value)
    parts = container.parts(value) if container else {}
    return [found for key, part in parts.items() for found in leaves_and_arrays(part, join_path(path, key))]


def fields_of(batch: Any, shared: Collection[str] = ()) -> dict[str, FieldValue]:
    """Returns the leaves that travel with samples, converted by `as_field`, by path.

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


def with_fields(batch: Batch, fields: Mapping[str, FieldValue], at: Mapping[str, Any] = _NOTHING) -> Batch:
    """Returns the batch with other values for some of its fields, or arrays; the inverse of `fields_of`.

    `at` replaces other parts of the batch, by path.
    """

    def replaced(path: str, leaf: Any) -> Any:
        name = field_name(path, leaf)
        return like(fields[name], leaf) if name in fields else leaf

    return transform(batch, replaced, at=at, kinds=Leaf | np.ndarray)


def arrays_of(value: Any, shared: Collection[str] = (), path: str = "") -> dict[str, np.ndarray]:
    """Returns the numpy arrays with rows, by path: objects, say, which one process can select but none send.

    Arguments are those of `leaves`.
    """
    if path in shared:
        return {}
    container = None if isinstance(value, Leaf) else container_type(value)
    if container is None:  # of its subclasses, a masked array would lose its mask
        return {path: value} if type(value) is np.ndarray and value.ndim else {}
    found: dict[str, np.ndarray] = {}
    for key, part in container.parts(value).items():
        if type(part) not in PLAINEST and key not in container.shared:
            found |= arrays_of(part, shared, join_path(path, key))
    return found


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
        if value.layout != torch.jagged or nested.lengths() is not None:
            raise TypeError(
                "a nested tensor has to have layout torch.jagged, and its rows without holes, to be "
                "placed row by row: make it again by "
                "torch.nested.nested_tensor(list(rows), layout=torch.jagged)"
            )
        values = nested.values().movedim(nested._ragged_idx - 1, 0)
        field = JaggedTensor(values=values, lengths=nested.offsets().diff())
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
        ragged_dim = cast(Any, leaf)._ragged_idx
        values = field.values().movedim(0, ragged_dim - 1)
        return torch.nested.nested_tensor_from_jagged(values, field.offsets(), jagged_dim=ragged_dim)
    return field


def move_to(batch: Batch, device: torch.device, non_blocking: bool = False) -> Batch:
    """Returns a batch of any type with every tensor on `device`."""
    return transform(batch, lambda _, leaf: leaf.to(device=device, non_blocking=non_blocking))


def pin(batch: Batch) -> Batch:
    """Returns the batch with every tensor in pinned host memory."""
    return transform(batch, lambda _, leaf: _pinned(leaf))


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
    if isinstance(value, NonTensorStack):
        return "it has a value that is no tensor for each row; make it a tensor"
    made = "make it a tensor" if isinstance(value, np.ndarray) else TAKE_APART
    return f"{made}, or declare what all samples share: {DECLARE_SHARED}"


def field_name(path: str, leaf: Leaf | np.ndarray) -> str:
    """Returns the name of a leaf's field: its path, with what sources must agree on."""
    if isinstance(leaf, np.ndarray):
        return f"{path} (array)"
    if isinstance(leaf, torch.Tensor) and leaf.is_nested and getattr(leaf, "_ragged_idx", 1) != 1:
        return f"{path}(ragged in dim {cast(Any, leaf)._ragged_idx})"
    if not isinstance(leaf, KeyedTensor):
        return path
    keys = zip(leaf.keys(), leaf.length_per_key(), strict=True)
    return f"{path}({', '.join(f'{key}: {width}' for key, width in keys)})"


def _pinned(leaf: Any) -> Any:
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
    if tensor.is_quantized or not _is_copied(tensor.dtype):
        raise TypeError(
            f"a tensor has dtype {tensor.dtype}, of which rows cannot be sent, because torch "
            f"{torch.__version__} does not copy them by their bytes alone; send quantized values as integers "
            "of at least 8 bits (int_repr), next to their scale, and others as bytes, view(torch.uint8)"
        )


@functools.cache
def _is_copied(dtype: torch.dtype) -> bool:
    """Returns whether torch copies tensors of a dtype. Versions differ, and none of them has a list.

    Selecting rows of other dtypes, or copying them to a device, would fail later, maybe on one rank alone.
    """
    try:
        torch.empty(1, dtype=dtype, device="cpu").clone()
    except RuntimeError:
        return False
    return True
