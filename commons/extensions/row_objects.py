"""Joins and divides batches that one process holds whole, including their numpy arrays and lists."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from ..sequence_batch.fields import FieldValue, hash_bytes, num_rows
from ..sequence_batch.packed_rows import PackedRows, checked_lengths, jagged_parts, read_together, select_rows
from ..sequence_batch.rows import Rows, hashes_of
from ..sequence_batch.tree import Part, PlainList, is_list, take_apart


class RowsWithObjects(Rows):
    """The rows of tensors, of numpy arrays of any dtype, and of lists with one entry per row.

    As a field, each array or list is a placeholder of one byte per row; `select` takes the actual entries.

    Args:
        batch: batch of any type that `Rows` takes. A `BaseBatch` has no arrays.
        shared: paths of the values that all samples share, lists included.
        num_rows: number of rows, if it is known. None means that they are counted.

    Attributes:
        objects: arrays with one row per sample, by path, and lists with one entry per row or per sample,
            stored as arrays of objects.
        shared_lists: lists of any other length, by path.
    """

    def __init__(self, batch: Any, shared: Collection[str] = (), num_rows: int | None = None) -> None:
        super().__init__(batch, shared)
        self.objects: dict[str, np.ndarray] = {}
        if not self.pads:  # exact type only: a masked array would lose its mask
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
        """Returns the rows of the tensors, or else the common length of arrays and lists, or None."""
        for name, value in super().tensor_fields().items():
            if not isinstance(value, torch.Tensor) or value.dim():
                return num_rows(name, value)
        counts = {len(of) for of in (*self.objects.values(), *lists.values())}
        return counts.pop() if len(counts) == 1 else None

    def tensor_fields(self) -> dict[str, FieldValue]:
        """Returns the tensors among the fields, and a placeholder for each array and list."""
        fields = dict(super().tensor_fields())
        some = next(iter(fields.values()), torch.empty(0, device="cpu"))
        device = (some if isinstance(some, torch.Tensor) else some.values()).device
        for path, rows in self.objects.items():
            name = f"{path} ({'list' if path in self._list_types else 'array'})"
            fields[name] = torch.zeros(len(rows), dtype=torch.uint8, device=device)
        return fields

    def select(self, sources: Sequence[PackedRows], positions: np.ndarray, num_rows: int) -> Any:
        """Returns a batch of these rows. Padding is None in lists and arrays of objects, else zero."""
        fields = select_rows(sources, positions, num_rows)
        return self.with_entries(positions, num_rows).replaced(fields, num_rows, len(positions)).batch

    def with_entries(self, positions: np.ndarray, num_rows: int) -> Self:
        """Returns these rows with only the entries of `others` at `positions`, and then padding."""
        made = copy.copy(self)
        made.objects = {path: _select(rows, positions, num_rows) for path, rows in self.objects.items()}
        return made

    def facts(self) -> dict[str, Any]:
        """Returns the plain values that neither have an entry per row nor are declared as shared, by path."""
        return {path: value for path, value in super().facts().items() if path not in self._list_types}

    def others(self) -> dict[str, Any]:
        """Returns the arrays and lists, by path."""
        lists = {path: of(self.objects[path]) for path, of in self._list_types.items()}
        return self.objects | lists


def lists_of(tree: Part) -> dict[str, PlainList]:
    """Returns the outermost lists of plain values that are not declared as shared, by path."""
    return {path: of for path, of in tree.facts().items() if is_list(of)}


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
    field_lists: Collection[str] | None = None,
) -> Any:
    """Joins batches of one kind. With jagged fields, the host waits once for the device.

    Args:
        batches: one batch per part. The batch of a part without samples may have no rows.
        partition: positions of each part's samples in the result, int64 `[samples]`.
        part_rows, num_rows: rows of each part and of the result, with the padding rows after the samples.
        shared: paths of the values that all samples share.
        whose: name of the function that received the batches, for messages.
        field_lists: paths of lists of tensors that are known to be fields. All others with an entry for each
            row of every part are refused. None means that all lists of tensors are refused.

    Raises:
        ValueError: a batch has the wrong number of rows; the batches differ in their fields, or in a value
            that belongs to no row; or the lengths of a jagged field do not account for its values.
        TypeError: a batch has no rows, or has a list of tensors that may be samples.
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
        if field_lists is None:
            view.tree.check_no_samples()
        view.tree.check_replaceable()
        views.append(view)
        if difference := views[0].schema.difference(view.schema):
            raise ValueError(f"batches 0 and {number} differ: {difference}; give {whose} the same fields")
        positions[samples] = first + np.arange(len(samples))
        first += view.num_rows
    if field_lists is not None:
        _check_lists([view for view in views if view.num_rows], field_lists)
    parts = [jagged_parts(view.fields, view.schema) for view in views]
    on_host = iter(read_together([part for of_view in parts for part in of_view]))
    sources = []
    for number, (view, of_view) in enumerate(zip(views, parts, strict=True)):
        own = [next(on_host) for _ in of_view]
        lengths = checked_lengths(view.fields, view.schema, view.num_rows, own, f" of batch {number}")
        sources.append(view.packed(lengths))
    _join_objects(views)
    return views[0].select(sources, positions, num_rows)


def _check_lists(views: Sequence[RowsWithObjects], field_lists: Collection[str]) -> None:
    """Raises a TypeError if a list of tensors may be samples: it has an entry for each row of every part.
    In parts of other sizes, a list of samples has tensors with other numbers of rows, which is an error."""
    for path in views[0].tree.tensor_lists().keys() - field_lists if views else ():
        if all(len(view.tree.tensor_lists().get(path, ())) == view.num_rows for view in views):
            views[0].tree.check_no_samples(views[0].num_rows)


def _join_objects(views: Sequence[RowsWithObjects]) -> None:
    """Concatenates the arrays and lists of all views, and stores them in the first view. Raises a
    ValueError if views differ in a list, number, or text without rows, such as a loss, or in a dtype."""
    first = views[0]
    values = [view.facts() for view in views]
    hashes = [hashes_of(of_view) for of_view in values]
    for number in range(len(views)):
        for path in sorted(values[0].keys() | values[number].keys()):
            if hashes[0].get(path) != hashes[number].get(path):
                here, there = values[0].get(path), values[number].get(path)
                raise ValueError(
                    f"batches 0 and {number} differ in {path!r}, which does not have an entry for each row: "
                    f"{here!r:.60} and {there!r:.60}; leave it out, or give it a row per sample"
                )
    for path in first.objects:
        arrays = [view.objects[path] for view in views]
        filled = [array for array in arrays if len(array)] or arrays[:1]  # empty ones may have any dtype
        if len(dtypes := {_joined_dtype(array.dtype) for array in filled}) > 1:
            raise ValueError(f"batches have other dtypes in {path!r}: {sorted(map(str, dtypes))}")
        first.objects[path] = np.concatenate(filled)


def check_results(fields: Mapping[str, FieldValue], whose: str) -> None:
    """Raises a ValueError if a result is a single number, such as a loss, which belongs to no sample. `whose`
    names the function that received the results, for messages."""
    for path, value in fields.items():
        if isinstance(value, torch.Tensor) and not value.dim():
            raise ValueError(
                f"{whose} got {path or 'values'!r}, a tensor without rows (0-d), which belongs to no sample; "
                "leave it out, or give it a row per sample"
            )


def hashes_at(value: Any, paths: Collection[str]) -> dict[str, int]:
    """Returns a hash of the value at each of these paths, by path. Paths that `value` lacks are left out."""
    found = _values(value)
    return {path: _hash(found[path]) for path in sorted(paths) if path in found}


def shared_in_results(
    values: Sequence[Any],
    shared: Collection[str],
    rows: Sequence[int],
    hashes: Mapping[str, int] | None = None,
) -> set[str]:
    """Returns the paths at which the results of all parts hold a value that all samples share.

    A batch may share a "scale", while a worker returns a "scale" per row. For two chunks of 3 rows each,
    `{"scale": s}` and `{"scale": s}` share it, whereas `{"scale": t[:3]}` and `{"scale": t[3:]}` do not.

    The samples of the batch share the values at the paths `shared`, and `hashes_at` returned their `hashes`.
    Parts without `rows` are ignored.

    Raises:
        ValueError: the value at a path could either be shared or have a row per sample.
    """
    found, counts = set(), [count for count in rows if count]
    with_rows = [_values(part) for part, count in zip(values, rows, strict=True) if count]
    for path in sorted(shared):
        at = [part.get(path) for part in with_rows]
        has_rows = all(_has_rows(part, count) for part, count in zip(at, counts, strict=True))
        if not has_rows or all(part is at[0] for part in at):
            found.add(path)
        elif len(alike := {_hash(part) for part in at}) == 1:
            if alike != {(hashes or {}).get(path)}:
                raise ValueError(
                    f"{path!r} is named as shared, and has a row for each row of every part, alike in all: "
                    "it may be either. Rename it if it is a result, else leave it out"
                )
            found.add(path)
    return found


def _values(value: Any) -> dict[str, Any]:
    """Returns the value and its parts by path, without plain numbers and texts."""
    return {part.path: part.value for part in take_apart(value).each()}


def _has_rows(part: Any, count: int) -> bool:
    """Returns whether everything that a part holds has `count` rows."""
    leaves = [held.value for held in take_apart(part).tensors_and_arrays()]
    if isinstance(part, list | tuple) and not leaves:
        return len(part) == count
    shapes = [leaf.shape[:1] if hasattr(leaf, "shape") else (num_rows("", leaf),) for leaf in leaves]
    return bool(leaves) and all(shape == (count,) for shape in shapes)


def _hash(part: Any) -> int:
    leaves = {below.path: below.value for below in take_apart(part).tensors_and_arrays()}
    arrays = {path: leaves.pop(path) for path, leaf in [*leaves.items()] if isinstance(leaf, np.ndarray)}
    hashes = hashes_of(leaves if leaves or arrays else {"": part})
    for path, array in arrays.items():
        if array.dtype != object:  # objects have no bytes
            hashes[path] = hash_bytes(repr((array.shape, array.dtype.str)).encode() + array.tobytes())
    return hash_bytes(repr(sorted(hashes.items())).encode())


def _joined_dtype(dtype: np.dtype) -> Any:
    """Returns a key on which joined arrays must agree. Numbers need equal dtypes, whereas texts may differ in
    width, and times in unit. Texts and objects may mix."""
    return dtype if dtype.kind in "biufcV" else "OSU" if dtype.kind in "OSU" else dtype.kind
