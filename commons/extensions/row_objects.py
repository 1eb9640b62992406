"""The rows of a batch that one process holds whole, where arrays and lists have rows, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..sequence_batch.base_batch import BaseBatch
from ..sequence_batch.container_types import is_plain, join_path
from ..sequence_batch.leaf_fields import Leaf, as_field, num_rows
from ..sequence_batch.packed_rows import PackedRows, checked_lengths, jagged_parts, read_together, select_rows
from ..sequence_batch.row_lists import PlainList, check_no_samples, hash_lists, hash_shared, lists_of
from ..sequence_batch.row_schema import FieldValue, hash_bytes
from ..sequence_batch.rows import Rows
from ..sequence_batch.tree import Part, check_replaceable, take_apart, tensors_and_arrays


class RowsWithObjects(Rows):
    """Rows of tensors, of numpy arrays of any dtype, and of lists that have an entry per row.

    The field of an array or list is a placeholder of one byte per row; `select` takes the rows themselves.

    Args:
        batch: batch of any type that `Rows` takes; a `BaseBatch` has no arrays.
        shared: paths of what all samples share, of lists, too.
        num_rows: rows of the batch, if it is known.

    Attributes:
        objects: arrays with one row per sample, by path; and lists with an entry per row, or per sample, as
            arrays of objects.
        shared_lists: lists of any other length, by path.
    """

    def __init__(self, batch: Any, shared: Collection[str] = (), num_rows: int | None = None) -> None:
        super().__init__(batch, shared)
        self.objects: dict[str, np.ndarray] = {}
        if not self.pads:  # of subclasses of arrays, a masked one would lose its mask
            parts = [part for part in self.tree.each() if type(part.value) is np.ndarray and part.value.ndim]
            self.objects = {part.path: part.value for part in parts if not part.is_shared}
            self._shared = {*shared, *self.objects}
            del self.tree
        every = {path: of for path, of in lists_of(self.tree).items() if not isinstance(of, dict)}
        if self.pads:
            num_rows = batch.batch_size
        elif num_rows is None:
            num_rows = self._count_rows(every)
        counts = {num_rows, batch.num_samples} if self.pads else {num_rows}
        lists = {path: of for path, of in every.items() if len(of) in counts}
        self.shared_lists = {path: of for path, of in every.items() if path not in lists}
        self._list_types = {path: tuple if isinstance(of, tuple) else list for path, of in lists.items()}
        for path, of in lists.items():
            entries = [*of, *[None] * ((num_rows or 0) - len(of))]
            self.objects[path] = np.fromiter(entries, object, len(entries))

    def _count_rows(self, lists: Mapping[str, PlainList]) -> int | None:
        """Returns the rows of tensors and arrays; without any, those of lists, if these agree."""
        for name, value in super().tensor_fields().items():
            if not isinstance(value, torch.Tensor) or value.dim():
                return num_rows(name, value)
        counts = {len(of) for of in (*self.objects.values(), *lists.values())}
        return counts.pop() if len(counts) == 1 else None

    def tensor_fields(self) -> dict[str, FieldValue]:
        """Returns the tensors among the fields, and those of arrays and lists."""
        fields = dict(super().tensor_fields())
        some = next(iter(fields.values()), torch.empty(0, device="cpu"))
        device = (some if isinstance(some, torch.Tensor) else some.values()).device
        for path, rows in self.objects.items():
            name = f"{path} ({'list' if path in self._list_types else 'array'})"
            fields[name] = torch.zeros(len(rows), dtype=torch.uint8, device=device)
        return fields

    def select(self, sources: Sequence[PackedRows], positions: np.ndarray, num_rows: int) -> Any:
        """Returns a batch of these rows; arrays and lists have None or zero in padding."""
        made = self.replaced(select_rows(sources, positions, num_rows), num_rows, len(positions))
        made.objects = {path: _select(rows, positions, num_rows) for path, rows in self.objects.items()}
        return made.batch

    def others(self) -> dict[str, Any]:
        """Returns arrays and lists."""
        lists = {path: of(self.objects[path]) for path, of in self._list_types.items()}
        return self.objects | lists


def _select(rows: np.ndarray, positions: np.ndarray, num_rows: int) -> np.ndarray:
    empty = None if rows.dtype == object else np.zeros((), rows.dtype)
    selected = np.full((num_rows, *rows.shape[1:]), empty, rows.dtype)
    selected[: len(positions)] = rows[positions]
    return selected


def join(
    batches: Sequence[Any],
    partition: Sequence[np.ndarray],
    part_rows: Sequence[int],
    num_rows: int,
    shared: Collection[str],
    whose: str,
    rows_of_samples: int | None = None,
) -> Any:
    """Joins batches of one kind; the host waits once for a device, if there are jagged fields.

    Args:
        batches: batch of each part; those without samples may have no rows.
        partition: positions of each part's samples in the result, int64 `[samples]`.
        part_rows: rows of each part, padding after its samples included.
        num_rows: rows of the result, padding after the samples included.
        shared: paths of what all samples share.
        whose: name of the function that was given them, for messages.
        rows_of_samples: entries of a list of tensors that may be samples; None for any number.

    Raises:
        ValueError: a batch has other rows; the batches have other fields; lengths of a jagged field do not
            account for its values; or what belongs to no row is not the same in all of them.
        TypeError: a batch has no rows, or a list of tensors that may be samples.
    """
    views: list[RowsWithObjects] = []
    positions, first = np.empty(sum(map(len, partition)), dtype=np.int64), 0
    for number, (batch, samples, expected) in enumerate(zip(batches, partition, part_rows, strict=True)):
        view = RowsWithObjects(batch, shared, expected if len(samples) else None)
        check_results(view.fields, whose)
        if view.num_rows != expected and (view.num_rows or len(samples)):
            raise ValueError(
                f"batch {number} has {view.num_rows} rows, expected {expected}: give {whose} a row for each "
                "row of the part, padding rows included"
            )
        check_no_samples(view.tree, rows_of_samples)
        check_replaceable(view.tree)
        views.append(view)
        if difference := views[0].schema.difference(view.schema):
            raise ValueError(
                f"batches 0 and {number} differ: {difference}; give {whose} the same fields of all parts"
            )
        positions[samples] = first + np.arange(len(samples))
        first += view.num_rows
    parts = [jagged_parts(view.fields, view.schema) for view in views]
    on_host = iter(read_together([part for of_view in parts for part in of_view]))
    sources = []
    for number, (view, of_view) in enumerate(zip(views, parts, strict=True)):
        own = [next(on_host) for _ in of_view]
        lengths = checked_lengths(view.fields, view.schema, view.num_rows, own, f" of batch {number}")
        sources.append(view.packed(lengths))
    _join_objects(views)
    return views[0].select(sources, positions, num_rows)


def _join_objects(views: Sequence[RowsWithObjects]) -> None:
    """Gives the first view the rows of all views' arrays and lists."""
    first = views[0]
    _check_without_rows(views)
    for path in first.objects:
        arrays = [view.objects[path] for view in views]
        filled = [array for array in arrays if len(array)] or arrays[:1]  # empty ones may have any dtype
        if len(dtypes := {_joined_dtype(array.dtype) for array in filled}) > 1:
            raise ValueError(
                f"batches have other dtypes in {path!r}: {sorted(map(str, dtypes))}; expected one"
            )
        first.objects[path] = np.concatenate(filled)


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
    found = _values(value)
    return {path: _hash(found[path]) for path in sorted(paths) if path in found}


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
        values: results of each part.
        shared: paths of what the samples of the batch share.
        rows: rows of each part; one without any does not tell.
        hashes: hashes of what the samples share, by path, as `hashes_at` returns them.

    Raises:
        ValueError: what is at a path may be either.
    """
    found, counts = set(), [count for count in rows if count]
    with_rows = [_values(part) for part, count in zip(values, rows, strict=True) if count]
    for path in sorted(shared):
        at = [part.get(path) for part in with_rows]
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


def _values(value: Any) -> dict[str, Any]:
    """Returns the parts of a value by path, without plain numbers and texts."""
    return {part.path: part.value for part in take_apart(value).each()}


def _has_rows(part: Any, count: int) -> bool:
    """Returns whether all that a part holds has so many rows."""
    leaves = [held.value for held in tensors_and_arrays(take_apart(part))]
    if isinstance(part, list | tuple) and not leaves:
        return len(part) == count
    return bool(leaves) and all(_rows_of(leaf) == count for leaf in leaves)


def _rows_of(leaf: Any) -> int:
    if not isinstance(leaf, Leaf):
        return len(leaf) if leaf.ndim else -1
    field = as_field(leaf)
    return -1 if isinstance(field, torch.Tensor) and not field.dim() else num_rows("", field)


def _hash(part: Any) -> int:
    tree = take_apart(part, {""})
    hashes = hash_shared(tree) if tensors_and_arrays(tree) else hash_lists({"": part})
    return hash_bytes(repr(sorted(hashes.items())).encode())


def _joined_dtype(dtype: np.dtype) -> Any:
    """Returns what arrays that are joined must agree on: a dtype of numbers. Texts, objects among them, may
    have other widths, and times other units."""
    return dtype if dtype.kind in "biufcV" else "OSU" if dtype.kind in "OSU" else dtype.kind


def _check_without_rows(views: Sequence[RowsWithObjects]) -> None:
    """Raises a ValueError if parts differ in a list, number or text that no row has, such as a loss."""
    values = [view.shared_lists | _plain_values(view.tree, view._shared) for view in views]
    hashes = [hash_lists(of_view) for of_view in values]
    for number in range(len(views)):
        for path in sorted(values[0].keys() | values[number].keys()):
            if hashes[0].get(path) != hashes[number].get(path):
                here, there = values[0].get(path), values[number].get(path)
                raise ValueError(
                    f"batches 0 and {number} differ in {path!r}, which does not have an entry for each row: "
                    f"{here!r:.60} and {there!r:.60}; leave it out, or give it a row per sample"
                )


def _plain_values(tree: Part, shared: Collection[str]) -> dict[str, Any]:
    """Returns the numbers and texts of a batch that are in no list, and not shared, by path."""
    found: dict[str, Any] = {}
    if tree.is_shared or tree.container is None or isinstance(tree.value, list | tuple):
        return found
    of_rows = {"batch_size", "actual_batch_size"} if isinstance(tree.value, BaseBatch) else set()
    for key, value in tree.container.parts(tree.value).items():
        path = join_path(tree.path, key)
        if not is_plain(value):
            found |= _plain_values(tree.parts[key], shared)
        elif path not in shared and key not in tree.container.shared | of_rows:
            found[path] = value
    return found
