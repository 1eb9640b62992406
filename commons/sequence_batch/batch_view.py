"""One view of any batch: a `BaseBatch`, or any container of tensors with one row per sample."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from .. import NAME
from . import containers
from .base_batch import BaseBatch, num_rows
from .packed_rows import PackedRows, read_lengths, select_rows
from .row_lists import check_no_samples, hash_lists, hash_shared, lists_in_attributes, lists_of, lists_of_one
from .row_remedies import remedy_for_rows
from .row_schema import FieldValue, RowSchema, lengths_of, with_parts

# Integers in which squares and FLOPs of lengths wrap.
NARROW_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32)
_HOST = torch.device("cpu")


def view_batch(batch: Any, shared: Collection[str] = ()) -> BatchView:
    """Returns the view of a batch.

    Args:
        batch: of any type that can be exchanged.
        shared: paths of what all samples share, as in "context.temperature" or "[2]".
    """
    return (_PaddedView if isinstance(batch, BaseBatch) else BatchView)(batch, shared)


class BatchView:
    """The rows of a batch that cannot tell its padding, and so has none; made by `view_batch`.

    `packed` is the way from a batch to its rows, `select` or `with_rows` the way back.

    Attributes:
        batch: as given.
        pads: whether the batch can tell its padding rows, and so may get some.
    """

    pads = False

    def __init__(self, batch: Any, shared: Collection[str] = ()) -> None:
        self.batch, self._shared = batch, shared

    @cached_property
    def fields(self) -> dict[str, FieldValue]:
        """The fields that travel with the samples, by path; each has one row per row of the batch.

        A jagged nested tensor is a JaggedTensor here, a KeyedTensor a tensor `[rows, width]`.

        Raises:
            TypeError: nothing in the batch has rows, or something would stay behind when samples move.
        """
        if fields := self.tensor_fields():
            return fields
        raise TypeError(
            f"{containers.type_name(self.batch)} has no rows to place; expected a BaseBatch, or tensors, "
            "KeyedJaggedTensors, JaggedTensors and KeyedTensors with one row per sample, in any nesting of "
            "dataclasses, dicts, TensorDicts, lists and (named) tuples. Take another type apart with "
            f"{NAME}.sequence_batch.register_batch_type"
        )

    def tensor_fields(self) -> dict[str, FieldValue]:
        """Returns the tensors, jagged and keyed ones among the fields."""
        return containers.fields_of(self.batch, self._shared)

    @cached_property
    def num_rows(self) -> int:
        """Rows of the batch.

        Raises:
            ValueError: the fields disagree.
        """
        rows = {name: num_rows(name, value) for name, value in self.fields.items()}
        if len(set(rows.values())) > 1:
            raise ValueError(
                f"fields have different numbers of rows: {rows}; each needs one row per sample. "
                f"{remedy_for_rows(self.batch, self.fields, rows)}"
            )
        return next(iter(rows.values()))

    @property
    def num_samples(self) -> int:
        """Rows that are samples, which come first."""
        return self.num_rows

    @cached_property
    def schema(self) -> RowSchema:
        """The schema of the fields."""
        return RowSchema.of(self.fields)

    @cached_property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self._any_tensor.device

    @property
    def is_pinned(self) -> bool:
        """Whether the rows are in pinned memory."""
        return self._any_tensor.is_pinned()

    def view(self, batch: Any) -> BatchView:
        """Returns the view of another batch of the same kind."""
        return type(self)(batch, self._shared)

    @property
    def _any_tensor(self) -> torch.Tensor:
        value = next(iter(self.fields.values()))
        return value if isinstance(value, torch.Tensor) else value.values()

    def packed(self, lengths: np.ndarray | None = None) -> PackedRows:
        """Returns all rows as machine words.

        Args:
            lengths: of the rows, int64 `[rows, keys]`; None to read them, for which the host waits.
        """
        if lengths is None:
            lengths = read_lengths(self.fields, self.schema, self.num_rows)
        return PackedRows.pack(self.fields, self.schema, lengths)

    def select(self, sources: Sequence[PackedRows], positions: np.ndarray, num_rows: int) -> Any:
        """Returns a batch of the same kind with the rows at these positions among those of all sources, and
        then padding up to `num_rows`."""
        return self.with_rows(select_rows(sources, positions, num_rows), num_rows, len(positions))

    def with_rows(self, fields: dict[str, FieldValue], batch_size: int, num_samples: int) -> Any:
        """Returns a batch of the same kind with other rows; what is not in `fields` stays."""
        return containers.with_fields(self.batch, fields)

    def first_row(self) -> Any:
        """Returns a batch of one row for a rank without samples: padding, or a copy of the first row where
        the batch does not know padding. The batch is on the host."""
        return self.select([self.packed()], np.zeros(0 if self.pads else 1, dtype=np.int64), 1)

    def copy(self) -> Any:
        """Returns the batch with its rows in memory of their own; no host-device synchronization."""
        fields = {name: _copy_of(value) for name, value in self.fields.items()}
        return self.with_rows(fields, self.num_rows, self.num_samples)

    def on_host(self) -> BatchView:
        """Returns this view if the batch is on the host, else that of a copy, for which this waits."""
        return self if self.device == _HOST else self.view(containers.move_to(self.batch, _HOST))

    def to_count(self) -> Any:
        """Returns the batch for counting: what is computed from its integers, such as squares, does not wrap.

        Lengths are int64, and so are integers with one number per row, or per element of a jagged field.
        Lengths and fields with one number per row are copies, which costs may be computed in place of. Jagged
        fields are new objects: what they keep once they are asked, such as offsets, a copy of the loaded
        batch to the device would take along.
        """
        shown: dict[str, FieldValue] = {}
        for path, value in self.fields.items():
            if not isinstance(value, torch.Tensor):
                is_narrow = value.values().dim() == 1 and value.values().dtype in NARROW_INTEGERS
                values = value.values().long() if is_narrow else value.values()
                lengths = lengths_of(value).to(torch.int64, copy=True)
                shown[path] = with_parts(value, values=values, lengths=lengths)
            elif value.dim() == 1 or (value.dim() == 2 and value.shape[1] == 1):
                dtype = torch.int64 if value.dtype in NARROW_INTEGERS else value.dtype
                shown[path] = value.to(dtype, copy=True)
        return self.with_rows(shown, self.num_rows, self.num_samples) if shown else self.batch

    def num_tokens(self) -> torch.Tensor:
        """Returns the tokens of each row, `[rows]` int64: its jagged elements."""
        tokens = torch.zeros(self.num_rows, dtype=torch.int64, device=self.device)
        for value in self.fields.values():
            if not isinstance(value, torch.Tensor):
                tokens += lengths_of(value).view(-1, self.num_rows).sum(0)
        return tokens

    def num_loss_tokens(self) -> torch.Tensor:
        """Returns the loss tokens of each row, `[rows]` int64: one."""
        return torch.ones(self.num_rows, dtype=torch.int64, device=self.device)

    def row_counts(self) -> dict[str, torch.Tensor]:
        """Returns `BaseBatch.row_counts`; none of another batch."""
        return {}

    def with_row_counts(self, counts: Mapping[str, np.ndarray]) -> Any:
        """Returns the batch with the row counts that a plan has, int64 `[rows]` each."""
        return self.batch

    def list_hashes(self) -> dict[str, int]:
        """Returns a hash of each list of plain values that is not declared as shared, by path."""
        return hash_lists(lists_of(self.batch, self._shared) | lists_in_attributes(self.batch))

    def shared_hashes(self) -> dict[str, int]:
        """Returns a hash of each tensor that is declared as shared, by path; the batch is on the host."""
        return hash_shared(self.batch, self._shared)

    def check(self) -> None:
        """Checks that the batch has the shared paths, and that it can be made again with other rows.

        Raises:
            ValueError: it has no such path, or is a `BaseBatch`.
            TypeError: see `containers.check_replaceable` and `check_no_samples`.
        """
        paths = containers.paths(self.batch) if self._shared else set()
        for path in sorted(set(self._shared) - paths):
            raise ValueError(
                f"shared_fields names {path!r}, which is not in the batch; there are {sorted(paths)}"
            )
        check_no_samples(self.batch, self.num_rows, self._shared)
        containers.check_replaceable(self.batch)


class _PaddedView(BatchView):
    """The rows of a `BaseBatch`, which knows its padding, and tells its counts."""

    pads = True
    batch: BaseBatch

    def tensor_fields(self) -> dict[str, FieldValue]:
        return self.batch.per_sample_fields()

    @cached_property
    def num_rows(self) -> int:
        return self.batch.batch_size

    @property
    def num_samples(self) -> int:
        return self.batch.num_samples

    def with_rows(self, fields: dict[str, FieldValue], batch_size: int, num_samples: int) -> BaseBatch:
        return self.batch.with_fields(fields, batch_size, num_samples)

    def num_tokens(self) -> torch.Tensor:
        return self.batch.num_tokens()

    def num_loss_tokens(self) -> torch.Tensor:
        return self.batch.num_loss_tokens()

    def row_counts(self) -> dict[str, torch.Tensor]:
        return self.batch.row_counts()

    def with_row_counts(self, counts: Mapping[str, np.ndarray]) -> BaseBatch:
        return self.batch.with_row_counts(counts)

    def check(self) -> None:
        if self._shared:
            raise ValueError(
                f"shared_fields names {sorted(self._shared)}, and {containers.type_name(self.batch)} is a "
                'BaseBatch: mark what its samples share with field(metadata={"per_sample": False})'
            )
        check_no_samples(self.batch, self.num_rows)
        containers.check_replaceable(self.batch)


def _copy_of(value: FieldValue) -> FieldValue:
    """Returns a field whose tensors have memory of their own."""
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    parts = {"values": value.values(), "lengths": lengths_of(value), "weights": value.weights_or_none()}
    return with_parts(value, **{name: part.clone() for name, part in parts.items() if part is not None})


def without_copied_row(output: Any) -> Any:
    """Returns a model's output for a batch whose only row is a copy, with no row in place of one, so that
    outputs add up to those of the samples: of tensors, arrays and lists of plain values. What has another
    number of rows, or none, may be about anything.
    """

    def without_row(_: str, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf[:0] if leaf.ndim and len(leaf) == 1 else leaf
        view = BatchView(leaf)
        try:
            (field,), rows = view.fields.values(), view.num_rows
        except (TypeError, ValueError):  # no rows to speak of, as in a number or a sparse tensor
            return leaf
        if rows != 1:
            return leaf
        if isinstance(field, torch.Tensor):
            return containers.like(field[:0], leaf)
        return view.select([view.packed()], np.zeros(0, dtype=np.int64), 0)

    try:
        at: dict[str, Any] = {path: [] for path in lists_of_one(output)}
        return containers.transform(output, without_row, at=at, kinds=containers.Leaf | np.ndarray)
    except TypeError:  # of a type that cannot be made again
        return output
