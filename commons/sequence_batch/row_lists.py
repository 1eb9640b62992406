"""Plain values in a batch, such as texts, request ids, or a longest length.

An exchange sends only tensors. It treats a list that is equal on all ranks, such as the names of features, as
shared, and refuses one that has an entry per row and differs.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch

from .. import NAME
from .row_schema import bytes_on_host, hash_bytes, lengths_of, parts_of, type_name
from .tree import (
    SEQUENCE,
    Part,
    container_type,
    held_in_attributes,
    is_plain,
    join_path,
    take_apart,
    tensors_and_arrays,
)

PlainList: TypeAlias = list | tuple | range | dict


def facts_of(tree: Part) -> dict[str, Any]:
    """Returns the plain values of a batch that are not declared as shared, by path.

    `{"x": x, "max_len": 20, "names": ["a", "b"]}` has `max_len` and `names`. A dict of plain values with
    numeric keys counts as a list, because the keys may be numbers of samples.
    """
    if tree.is_shared or isinstance(tree.value, torch.device):  # ranks differ in their devices
        return {}
    is_whole = tree.container is None or _may_be_list(tree)
    if is_whole and all(below.container is not None or is_plain(below.value) for below in tree.each()):
        return {tree.path: tree.value}
    found: dict[str, Any] = {}
    for part in tree.parts.values():
        found |= facts_of(part)
    return found


def facts_in_attributes(tree: Part) -> dict[str, Any]:
    """Returns the plain values that only attributes of containers hold, by path."""
    found: dict[str, Any] = {}
    for owner, name, attribute in held_in_attributes(tree):
        has_entries = is_list(attribute) and len(attribute) > 0
        is_part = has_entries and any(attribute is part.value for part in owner.each())
        if (has_entries or (is_plain(attribute) and not name.startswith("_"))) and not is_part:
            found |= facts_of(take_apart(attribute, path=join_path(owner.path, name)))
    return found


def is_list(fact: Any) -> bool:
    """Returns whether a plain value is a list that may have an entry per row."""
    return isinstance(fact, PlainList) and not isinstance(fact, torch.Size)


def hash_facts(facts: Mapping[str, Any]) -> dict[str, int]:
    """Returns a 63-bit hash of each plain value, which is the same in every process."""
    return {path: hash_bytes(_text(value).encode()) for path, value in facts.items()}


def hash_leaves(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Returns a hash of the contents of each leaf, by path. Some layouts have none."""
    found = {}
    for path, leaf in leaves.items():
        with suppress(TypeError, RuntimeError):
            parts = parts_of(leaf)
            if not isinstance(leaf, torch.Tensor):
                parts.pop("offsets", None)  # ranks may differ in which of the two they have cached
                parts["lengths"] = lengths_of(leaf).long()
            found[path] = hash_bytes(b"".join(map(_bytes_of, parts.values())))
    return found


def check_no_samples(tree: Part, num_rows: int | None = None) -> None:
    """Raises a TypeError if a list of `tensor_lists` may hold samples: if it has an entry for each row.

    Without `num_rows`, any list may: an error must not depend on how many rows a rank happens to have.
    """
    for path, entries in tensor_lists(tree).items():
        if num_rows in (None, len(entries)):
            of = f", in a batch of {num_rows} rows" if num_rows else ""
            raise TypeError(
                f"{path or 'the batch'} is a {type_name(entries)} of {len(entries)} similar entries{of}: "
                "they may be fields or samples. Make it a tuple, or a dict with names, if they are fields. "
                "If they are samples, collate them to tensors with a row each, or divide them by parts = "
                f"{NAME}.partition.refined(costs, n); [[samples[i] for i in part] for part in parts]"
            )


def tensor_lists(tree: Part) -> dict[str, Any]:
    """Returns the lists, and dicts with numeric keys, of two or more alike entries with tensors, by path.

    Entries that differ in their types, dtypes or dimensions are fields, and so are entries of tuples.
    """
    found = {}
    for part in tree.each():
        if _may_be_list(part) and not (isinstance(part.value, tuple) or part.is_shared):
            kinds = {tuple(_kind_of(below.value) for below in of.each()) for of in part.parts.values()}
            if len(kinds) == 1 < len(part.parts) and tensors_and_arrays(part):
                found[part.path] = part.value
    return found


def _may_be_list(part: Part) -> bool:
    """Returns whether a part's entries have numbers rather than names."""
    if isinstance(part.value, dict) and part.value:
        return all(isinstance(key, int | np.integer) or str(key).isdigit() for key in part.value)
    return part.container is SEQUENCE


def _kind_of(value: Any) -> Any:
    is_dense = isinstance(value, torch.Tensor | np.ndarray)
    return (type(value), value.dtype, value.ndim) if is_dense else type(value)


def _bytes_of(part: torch.Tensor) -> bytes:
    return repr((tuple(part.shape), part.dtype)).encode() + bytes_on_host(part).tobytes()


def _text(value: Any) -> str:
    """Returns a text of plain values that depends on neither memory addresses nor the order of a set."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, range):
        return repr(list(value))
    if isinstance(value, np.ndarray) and value.dtype != object:  # whose text may leave out numbers
        return f"{value.dtype} {value.shape} {value.tobytes()!r}"
    if type(value).__repr__ is object.__repr__:  # which shows the address
        return type_name(value)
    container = container_type(value)
    if container is None:
        return repr(value)
    return f"[{', '.join(f'{key!r}: {_text(part)}' for key, part in container.parts(value).items())}]"
