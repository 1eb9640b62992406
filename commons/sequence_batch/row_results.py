"""Results of models and workers for the rows of a batch, under names of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from .base_batch import num_rows
from .container_types import container_type, join_path
from .containers import Leaf, as_field, leaves_and_arrays
from .row_lists import hash_lists, hash_shared
from .row_schema import FieldValue, hash_bytes


def check_results(fields: Mapping[str, FieldValue], whose: str) -> None:
    """Checks that results have rows; `whose` says where they were given.

    Raises:
        ValueError: one is a number, such as a loss, which belongs to no sample.
    """
    for path, value in fields.items():
        if isinstance(value, torch.Tensor) and not value.dim():
            raise ValueError(
                f"{whose} got {path or 'values'!r}, a tensor without rows (0-d), which belongs to no sample; "
                "leave it out, or give it a row per sample"
            )


def hashes_at(value: Any, paths: Collection[str]) -> dict[str, int]:
    """Returns a hash of what a batch has at each of these paths."""
    return {path: _hash(part) for path in sorted(paths) if (part := _at(value, path)) is not None}


def shared_in_results(
    values: Sequence[Any],
    shared: Collection[str],
    rows: Sequence[int],
    hashes: Mapping[str, int] | None = None,
) -> set[str]:
    """Returns the paths at which parts of a batch, or results for them, hold what all samples share.

    Batch fields "scale" may be shared, while a worker returns a "scale" per row: of two chunks with 3 rows,
    `{"scale": s}` and `{"scale": s}` share it, but `{"scale": t[:3]}` and `{"scale": t[3:]}` do not.

    Args:
        values: of each part.
        shared: paths of what the samples of the batch share.
        rows: rows of each part; one without any does not tell.
        hashes: of what the samples share, by path, as `hashes_at` returns them.

    Raises:
        ValueError: what is at a path may be either.
    """
    found, counts = set(), [count for count in rows if count]
    for path in sorted(shared):
        at = [_at(part, path) for part, count in zip(values, rows, strict=True) if count]
        has_rows = all(_has_rows(part, count) for part, count in zip(at, counts, strict=True))
        if not has_rows or all(part is at[0] for part in at):
            found.add(path)
        elif len(alike := {_hash(part) for part in at}) == 1:
            if alike == {(hashes or {}).get(path)}:
                found.add(path)
                continue
            raise ValueError(
                f"{path!r} is named as shared, and has a row for each row of every part, alike in all: it "
                "may be either. Rename it if it is a result, else leave it out"
            )
    return found


def _at(value: Any, wanted: str, path: str = "") -> Any:
    """Returns the part at a path; None if there is none."""
    if path == wanted:
        return value
    container = None if isinstance(value, Leaf) else container_type(value)
    for key, part in container.parts(value).items() if container else ():
        if wanted.startswith(below := join_path(path, key)):
            found = _at(part, wanted, below)
            if found is not None:
                return found
    return None


def _has_rows(part: Any, count: int) -> bool:
    """Returns whether all that a part holds has so many rows."""
    if isinstance(part, list | tuple) and not leaves_and_arrays(part):
        return len(part) == count
    leaves = [leaf for _, leaf in leaves_and_arrays(part)]
    return bool(leaves) and all(_rows_of(leaf) == count for leaf in leaves)


def _rows_of(leaf: Any) -> int:
    if not isinstance(leaf, Leaf):
        return len(leaf) if leaf.ndim else -1
    field = as_field(leaf)
    return -1 if isinstance(field, torch.Tensor) and not field.dim() else num_rows("", field)


def _hash(part: Any) -> int:
    hashes = hash_shared(part, {""}) if leaves_and_arrays(part) else hash_lists({"": part})
    return hash_bytes([repr(sorted(hashes.items())).encode()])
