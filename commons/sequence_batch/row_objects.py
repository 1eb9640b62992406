"""The rows of a batch that one process holds whole, where arrays and lists have rows, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from . import containers
from .base_batch import BaseBatch
from .base_batch import num_rows as count_rows
from .batch_view import BatchView, _PaddedView
from .container_types import container_type, is_plain, join_path
from .row_lists import PlainList, lists_of, with_entries
from .row_schema import FieldValue


def view_with_objects(
    batch: Any, shared: Collection[str] = (), first: int = 0, num_rows: int | None = None
) -> _ViewWithObjects:
    """Returns the view of a batch, with its numpy arrays of any dtype, and lists that have an entry per row.

    Args:
        batch: as `view_batch` takes it; a `BaseBatch` has no arrays.
        shared: paths of what all samples share, of lists, too.
        first: the number of the first row among those of all batches that are joined.
        num_rows: rows of the batch, if it is known.
    """
    of = _PaddedWithObjects if isinstance(batch, BaseBatch) else _ViewWithObjects
    return of(batch, shared, first, num_rows)


def join_objects(views: Sequence[_ViewWithObjects]) -> None:
    """Gives the first view the rows of all views' arrays and lists.

    Raises:
        ValueError: a list that has not an entry per row, or a number or text, is not the same in all of them.
    """
    first = views[0]
    _check_plain_values(views)
    for number, view in enumerate(views):
        for path in first.shared_lists.keys() | view.shared_lists.keys():
            here, there = first.shared_lists.get(path), view.shared_lists.get(path)
            if here != there:
                raise ValueError(
                    f"batches 0 and {number} differ in {path!r}, which has not an entry for each of their "
                    f"{first.num_rows} and {view.num_rows} rows: {here!r:.60} and {there!r:.60}"
                )
    for path in first.arrays:
        arrays = [view.arrays[path] for view in views]
        filled = [array for array in arrays if len(array)] or arrays[:1]  # empty ones may have any dtype
        if len(dtypes := {_joined_dtype(array.dtype) for array in filled}) > 1:
            raise ValueError(
                f"batches have other dtypes in {path!r}: {sorted(map(str, dtypes))}; expected one"
            )
        first.arrays[path] = np.concatenate(filled)
    for path, entries in first.lists.items():
        joined = [entry for view in views for entry in _padded(view.lists[path], view.num_rows)]
        first.lists[path] = tuple(joined) if isinstance(entries, tuple) else joined


class _ViewWithObjects(BatchView):
    """Rows of tensors, arrays and lists; the field of an array or list is the numbers of its rows, from 1 on,
    0 for padding.

    Attributes:
        arrays: those with one row per sample, by path.
        lists: those with an entry per row, or per sample, by path.
        shared_lists: all others.
    """

    def __init__(self, batch: Any, shared: Collection[str], first: int, num_rows: int | None) -> None:
        is_padded = isinstance(batch, BaseBatch)
        self.arrays = {} if is_padded else containers.arrays_of(batch, shared)
        self._first, self._given = first, shared
        super().__init__(batch, {*shared, *self.arrays})
        every = {path: of for path, of in lists_of(batch, shared).items() if not isinstance(of, dict)}
        if num_rows is None and not is_padded:
            num_rows = self._count_rows(every)
        counts = {batch.batch_size, batch.num_samples} if is_padded else {num_rows}
        self.lists: dict[str, PlainList] = {path: of for path, of in every.items() if len(of) in counts}
        self.shared_lists = {path: of for path, of in every.items() if path not in self.lists}

    def _count_rows(self, lists: Mapping[str, PlainList]) -> int | None:
        """Returns the rows of tensors and arrays; without any, those of lists, if these agree."""
        for name, value in containers.fields_of(self.batch, self._shared).items():
            if not isinstance(value, torch.Tensor) or value.dim():
                return count_rows(name, value)
        counts = {len(of) for of in (*self.arrays.values(), *lists.values())}
        return counts.pop() if len(counts) == 1 else None

    def tensor_fields(self) -> dict[str, FieldValue]:
        fields = dict(super().tensor_fields())
        some = next(iter(fields.values()), torch.empty(0, device="cpu"))
        device = (some if isinstance(some, torch.Tensor) else some.values()).device
        objects = {containers.field_name(path, array): len(array) for path, array in self.arrays.items()}
        objects |= {_name(path): len(entries) for path, entries in self.lists.items()}
        rows = self.batch.batch_size if isinstance(self.batch, BaseBatch) else None
        for name, count in objects.items():
            numbers = torch.arange(1, (rows or count) + 1, device=device)
            fields[name] = (self._first + numbers) * (numbers <= count)
        return fields

    def view(self, batch: Any) -> BatchView:
        """Returns the view of a batch of this kind, which may have arrays and lists, too."""
        return view_with_objects(batch, self._given, self._first)

    def with_rows(self, fields: dict[str, FieldValue], batch_size: int, num_samples: int) -> Any:
        """Returns the batch with other rows, in arrays and lists those that fields number; None or zero in
        padding."""
        arrays: dict[str, Any] = {}
        for path, array in self.arrays.items():
            name = containers.field_name(path, array)
            if name in fields:
                numbers = fields[name].cpu().numpy()
                empty = None if array.dtype == object else np.zeros((), array.dtype)
                arrays[name] = np.full((len(numbers), *array.shape[1:]), empty, array.dtype)
                arrays[name][numbers > 0] = array[numbers[numbers > 0] - 1]
        made = super().with_rows(fields | arrays, batch_size, num_samples)
        for path, entries in self.lists.items():
            if _name(path) in fields:
                numbers = fields[_name(path)].cpu().numpy()
                made = with_entries(made, {path: entries}, numbers[numbers > 0] - 1, len(numbers))
        return made


class _PaddedWithObjects(_ViewWithObjects, _PaddedView):
    @cached_property
    def num_rows(self) -> int:
        return self.batch.batch_size


def _joined_dtype(dtype: np.dtype) -> Any:
    """Returns what arrays that are joined must agree on: a dtype of numbers. Texts, objects among them, may
    have other widths, and times other units."""
    return dtype if dtype.kind in "biufcV" else "OSU" if dtype.kind in "OSU" else dtype.kind


def _check_plain_values(views: Sequence[_ViewWithObjects]) -> None:
    """Raises a ValueError if a number or text that no row has, such as a loss, differs between parts."""
    first = _plain_values(views[0].batch, views[0]._given)
    for number, view in enumerate(views):
        for path, value in _plain_values(view.batch, view._given).items():
            if path in first and repr(value) != repr(first[path]):
                raise ValueError(
                    f"batches 0 and {number} differ in {path!r}, which belongs to no row: "
                    f"{first[path]!r:.60} and {value!r:.60}; leave it out, or give it a row per sample"
                )


def _plain_values(value: Any, shared: Collection[str], path: str = "") -> dict[str, Any]:
    if path in shared or isinstance(value, list | tuple):
        return {}
    if is_plain(value):
        return {path: value}
    container = None if isinstance(value, containers.Leaf) else container_type(value)
    parts = dict(container.parts(value)) if container else {}
    if isinstance(value, BaseBatch):  # of its rows
        parts = {key: part for key, part in parts.items() if key not in ("batch_size", "actual_batch_size")}
    found: dict[str, Any] = {}
    for key, part in parts.items():
        if container is not None and key not in container.shared:
            found |= _plain_values(part, shared, join_path(path, key))
    return found


def _name(path: str) -> str:
    return f"{path} (list)"


def _padded(entries: Any, num_rows: int) -> list[Any]:
    return [*entries, *[None] * (num_rows - len(entries))]
