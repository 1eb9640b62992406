"""Lists of plain values in a batch, such as texts or ids of requests.

A length that happens to fit tells nothing, so what a list belongs to is declared, or compared. A process
that has the whole batch moves entries with their rows. An exchange, which sends tensors alone, takes lists
that are equal on all ranks for shared, as names of features are, and refuses others.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Hashable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from .. import NAME
from . import containers
from .container_types import SEQUENCE, container_type, is_plain, join_path, type_name
from .optional_types import JaggedTensor, KeyedJaggedTensor
from .row_schema import hash_bytes

PlainList: TypeAlias = list | tuple | range | dict

RECIPE = f"parts = {NAME}.partition.refined(costs, n); [[samples[i] for i in part] for part in parts]"


def lists_of(value: Any, shared: Collection[str] = (), path: str = "") -> dict[str, PlainList]:
    """Returns the outermost lists and tuples that hold plain values alone, by path.

    Those that are declared as shared are left out, as `containers.leaves` does. A dict of plain values whose
    keys are numbers counts as a list: they may be numbers of samples.
    """
    if path in shared:
        return {}
    if isinstance(value, range) or (_may_be_list(value) and _is_plain_throughout(value)):
        return {path: value}
    container = None if isinstance(value, containers.Leaf) else container_type(value)
    if container is None:
        return {}
    found: dict[str, PlainList] = {}
    for key, part in container.parts(value).items():
        if type(part) not in containers.PLAINEST and key not in container.shared:
            found |= lists_of(part, shared, join_path(path, key))
    return found


def lists_of_one(value: Any, path: str = "") -> list[str]:
    """Returns the paths of lists with one entry, of plain values; a tuple of one is no list."""
    container = None if isinstance(value, containers.Leaf) else container_type(value)
    if isinstance(value, list) and len(value) == 1 and _is_plain_throughout(value):
        return [path]
    parts = container.parts(value) if container else {}
    return [found for key, part in parts.items() for found in lists_of_one(part, join_path(path, key))]


def lists_in_attributes(value: Any, path: str = "") -> dict[str, PlainList]:
    """Returns the lists and tuples of plain values that only attributes of containers hold, by path."""
    container = None if isinstance(value, containers.Leaf) else container_type(value)
    if container is None:
        return {}
    found: dict[str, PlainList] = {}
    if isinstance(value, MutableMapping | list | tuple):
        held = {id(part) for part in container.parts(value).values()} | {id(value)}
        for name, attribute in containers.attributes(value):
            if isinstance(attribute, list | tuple) and attribute and id(attribute) not in held:
                found |= lists_of(attribute, (), join_path(path, name))
    for key, part in container.parts(value).items():
        if type(part) not in containers.PLAINEST:
            found |= lists_in_attributes(part, join_path(path, key))
    return found


def row_lists(batch: Any, counts: Collection[int], shared: Collection[str] = ()) -> dict[str, PlainList]:
    """Returns the lists of `lists_of` with as many entries as one of `counts`, which are rows or samples."""
    found = lists_of(batch, shared).items()
    return {path: of for path, of in found if len(of) in counts and not isinstance(of, dict)}


def with_entries(batch: Any, lists: Mapping[str, PlainList], rows: Any, num_rows: int) -> Any:
    """Returns the batch with the entries of these rows in its lists, as `select_entries` does."""
    at = {path: select_entries(entries, rows, num_rows) for path, entries in lists.items()}
    return containers.transform(batch, lambda _, leaf: leaf, at=at) if at else batch


def select_entries(entries: PlainList, rows: Sequence[int] | np.ndarray, num_rows: int) -> PlainList:
    """Returns a list of the entries of these rows, then None up to `num_rows`.

    Rows beyond the list, which are padding, have none.
    """
    chosen = [entries[int(row)] for row in rows if row < len(entries)]
    chosen += [None] * (num_rows - len(rows))
    return tuple(chosen) if isinstance(entries, tuple) else chosen


def hash_lists(lists: Mapping[str, PlainList]) -> dict[str, int]:
    """Returns a 63-bit hash of each list, the same in every process."""
    return {path: hash_bytes([_text(entries).encode()]) for path, entries in lists.items()}


def hash_shared(value: Any, shared: Collection[str] = (), path: str = "") -> dict[str, int]:
    """Returns a hash of each host tensor and array that is declared as shared, by path."""
    if path in shared:
        found = {}
        for below, leaf in containers.leaves_and_arrays(value, path):
            try:
                found[below] = hash_bytes(_bytes_of(part) for part in _parts(leaf))
            except (TypeError, RuntimeError, NotImplementedError):  # of a layout without bytes
                continue
        return found
    container = None if isinstance(value, containers.Leaf) else container_type(value)
    hashes: dict[str, int] = {}
    for key, part in container.parts(value).items() if container else ():
        below = join_path(path, key)
        hashes |= hash_shared(part, {below} if key in container.shared else shared, below)  # type: ignore
    return hashes


def check_no_samples(
    value: Any, num_rows: int | None = None, shared: Collection[str] = (), path: str = ""
) -> None:
    """Checks that tensors in a list, or under numbers, are fields, not samples of a batch of so many rows.

    Without a number of rows, which a rank alone may have, any that are alike may be samples.

    Raises:
        TypeError: both are possible. Tuples, and dicts with names, are fields.
    """
    container = None if isinstance(value, containers.Leaf) or path in shared else container_type(value)
    if container is None:
        return
    parts = container.parts(value)
    fits = num_rows is None or len(parts) == num_rows
    if _may_be_list(value) and not isinstance(value, tuple) and fits and len(parts) > 1:
        kinds = {_kind_of(part) for part in parts.values()}
        if len(kinds) == 1 and any(map(containers.leaves_and_arrays, parts.values())):
            of = f", in a batch of {num_rows} rows" if num_rows else ""
            raise TypeError(
                f"{path or 'the batch'} is a {type_name(value)} of {len(parts)} alike entries{of}: they may "
                "be fields or samples. Make it a tuple, or a dict with names, if they are fields. Collate "
                f"samples to tensors with a row each, or divide them by {RECIPE}"
            )
    for key, part in parts.items():
        if key not in container.shared:
            check_no_samples(part, num_rows, shared, join_path(path, key))


def are_samples(value: Any) -> bool:
    """Returns whether a batch is a list, or a dict by number, of several alike entries with tensors."""
    container = None if isinstance(value, containers.Leaf) else container_type(value)
    if container is None or not _may_be_list(value):
        return False
    kinds = {_kind_of(part) for part in container.parts(value).values()}
    return len(value) > 1 and len(kinds) == 1 and not _is_plain_throughout(value)


def _may_be_list(value: Any) -> bool:
    """Returns whether entries have numbers in place of names."""
    container = None if isinstance(value, containers.Leaf) else container_type(value)
    if isinstance(value, dict) and container is not None:
        return bool(value) and all(_is_number(key) for key in value)
    return container is SEQUENCE and isinstance(value, list | tuple)


def _is_number(key: Hashable) -> bool:
    return isinstance(key, int | np.integer) or (isinstance(key, str) and key.isdigit())


def _is_plain_throughout(value: Any) -> bool:
    container = None if isinstance(value, containers.Leaf) else container_type(value)
    if container is None:
        return is_plain(value)
    return all(_is_plain_throughout(part) for part in container.parts(value).values())


def _kind_of(value: Any) -> Any:
    """Returns what fields of one kind have in common, but for their number of rows."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value), value.dtype, value.ndim
    container = None if isinstance(value, containers.Leaf) else container_type(value)
    if container is None:
        return type(value)
    return type(value), tuple((key, _kind_of(part)) for key, part in container.parts(value).items())


def _parts(leaf: Any) -> list[Any]:
    if isinstance(leaf, JaggedTensor | KeyedJaggedTensor):
        parts = leaf.values(), leaf.weights_or_none(), leaf.lengths_or_none(), leaf.offsets_or_none()
        return [part for part in parts if part is not None]
    return [leaf if isinstance(leaf, torch.Tensor | np.ndarray) else leaf.values()]


def _bytes_of(part: Any) -> bytes:
    if isinstance(part, np.ndarray):
        if part.dtype == object:
            raise TypeError("objects have no bytes")
        return repr((part.shape, part.dtype.str)).encode() + part.tobytes()
    flat = part.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return repr((tuple(part.shape), part.dtype)).encode() + flat.view(torch.uint8).numpy().tobytes()


def _text(value: Any) -> str:
    """Returns a text of plain values that does not depend on addresses, or on the order of a set."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, range):
        return repr(list(value))
    container = container_type(value)
    if container is None:
        return repr(value)
    return f"[{', '.join(f'{key!r}: {_text(part)}' for key, part in container.parts(value).items())}]"
