"""Rows of any batch: a `BaseBatch`, or any container of tensors with one row per sample."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import numpy as np
import torch

from .. import NAME
from . import containers
from .base_batch import BaseBatch, num_rows
from .packed_rows import PackedRows, select_from
from .row_schema import FieldValue, RowSchema, with_parts

Batch = TypeVar("Batch")
# Integers in which squares and FLOPs of lengths wrap.
NARROW_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32)


def knows_padding(batch: Any) -> bool:
    """Returns whether the batch can tell its padding rows; any other batch is never padded."""
    return isinstance(batch, BaseBatch)


class SampleRows:
    """Reads, selects and replaces the rows of batches of any type.

    `packed` is the way from a batch to its rows, `unpacked` the way back.

    Args:
        shared: paths of what all samples of a batch share, as in "context.temperature" or "[2]".

    Raises:
        TypeError: `shared` is a string.
    """

    def __init__(self, shared: Collection[str] = ()) -> None:
        if isinstance(shared, str):
            raise TypeError(f"shared_fields is {shared!r}; expected a tuple of paths, as in ({shared!r},)")
        self.shared = frozenset(shared)

    def packed(self, batch: Any) -> PackedRows:
        """Returns all rows of a batch as machine words; no host-device synchronization."""
        fields = self.per_sample_fields(batch)
        rows = batch.batch_size if isinstance(batch, BaseBatch) else _common_rows(fields)
        return PackedRows.pack(fields, RowSchema.of(fields), rows)

    def unpacked(self, like: Batch, rows: PackedRows, batch_size: int) -> Batch:
        """Returns a batch of the same kind as `like` that has other rows.

        Args:
            like: gives the type, and what samples share.
            rows: the samples, as `gather_rows` returns them.
            batch_size: rows of the batch; those after the samples are padding.
        """
        return self.with_rows(like, rows.unpack(batch_size), batch_size, rows.num_rows)

    def per_sample_fields(self, batch: Any) -> dict[str, FieldValue]:
        """Returns the fields that travel with the samples, by path; each has one row per row of the batch.

        A jagged nested tensor is returned as a JaggedTensor, a KeyedTensor as a tensor `[rows, width]`.

        Raises:
            TypeError: nothing in the batch has rows, or something would stay behind when samples move.
        """
        if isinstance(batch, BaseBatch):
            return batch.per_sample_fields()
        fields = containers.fields_of(batch, self.shared)
        if fields:
            return fields
        raise TypeError(
            f"{containers.type_name(batch)} has no rows to place; expected a BaseBatch, or tensors, "
            "KeyedJaggedTensors, JaggedTensors and KeyedTensors with one row per sample, in any nesting of "
            "dataclasses, dicts, TensorDicts, lists and (named) tuples. Take another type apart with "
            f"{NAME}.sequence_batch.register_batch_type"
        )

    def batch_rows(self, batch: Any) -> tuple[int, int]:
        """Returns the rows of a batch, and how many of them are samples: all, if it does not know padding.

        Raises:
            ValueError: the fields disagree.
        """
        if isinstance(batch, BaseBatch):
            return batch.batch_size, batch.num_samples
        rows = _common_rows(self.per_sample_fields(batch))
        return rows, rows

    def with_rows(
        self, batch: Batch, fields: dict[str, FieldValue], batch_size: int, num_samples: int
    ) -> Batch:
        """Returns a batch of the same kind with other rows; what is not in `fields` stays."""
        if isinstance(batch, BaseBatch):
            return batch.with_fields(fields, batch_size, num_samples)
        return containers.with_fields(batch, fields)

    def num_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the tokens of each row, `[batch_size]` int64.

        They are what a `BaseBatch` says, and the jagged elements of any other batch.
        """
        if isinstance(batch, BaseBatch):
            return batch.num_tokens()
        rows, _ = self.batch_rows(batch)
        tokens = torch.zeros(rows, dtype=torch.int64, device=self.device_of(batch))
        for value in self.per_sample_fields(batch).values():
            if not isinstance(value, torch.Tensor):
                tokens += value.lengths().view(-1, rows).sum(0)
        return tokens

    def num_loss_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the loss tokens of each row, `[batch_size]` int64.

        They are what a `BaseBatch` says, and one per row of any other batch.
        """
        if isinstance(batch, BaseBatch):
            return batch.num_loss_tokens()
        return torch.ones(self.batch_rows(batch)[0], dtype=torch.int64, device=self.device_of(batch))

    def row_counts(self, batch: Any) -> dict[str, torch.Tensor]:
        """Returns the `row_counts` of a `BaseBatch`; none of any other batch."""
        return batch.row_counts() if isinstance(batch, BaseBatch) else {}

    def row_or_padding(self, batch: Batch) -> Batch:
        """Returns a batch of one row for a rank without samples.

        It is padding if the batch knows padding, else a copy of the first row. `batch` is on the host.
        """
        chosen = np.zeros(0 if knows_padding(batch) else 1, dtype=np.int64)
        return self.unpacked(batch, select_from([self.packed(batch)], chosen), 1)

    def copied(self, batch: Batch) -> Batch:
        """Returns the batch with its rows in memory of their own."""
        batch_size, num_samples = self.batch_rows(batch)
        rows = select_from([self.packed(batch)], np.arange(batch_size))
        return self.with_rows(batch, rows.unpack(), batch_size, num_samples)

    def with_long_lengths(self, batch: Batch) -> Batch:
        """Returns the batch with int64 lengths, so that what a user computes from them does not wrap."""
        widened = {
            path: with_parts(value, lengths=value.lengths().long())
            for path, value in self.per_sample_fields(batch).items()
            if not isinstance(value, torch.Tensor) and value.lengths().dtype in NARROW_INTEGERS
        }
        return self.with_rows(batch, widened, *self.batch_rows(batch)) if widened else batch

    def device_of(self, batch: Any) -> torch.device:
        """Returns the device of a batch's rows."""
        return self._any_tensor(batch).device

    def to_host(self, batch: Batch) -> Batch:
        """Returns the batch itself if it is on the host, else a copy, for which this waits."""
        host = torch.device("cpu")
        return batch if self.device_of(batch) == host else containers.moved_to(batch, host)

    def is_pinned(self, batch: Any) -> bool:
        """Returns whether a batch's rows are in pinned memory."""
        return self._any_tensor(batch).is_pinned()

    def _any_tensor(self, batch: Any) -> torch.Tensor:
        value = next(iter(self.per_sample_fields(batch).values()))
        return value if isinstance(value, torch.Tensor) else value.values()

    def check_shared(self, batch: Any) -> None:
        """Checks that the batch has the paths in `shared`.

        Raises:
            ValueError: the batch has no such path, or is a `BaseBatch`.
        """
        if self.shared and isinstance(batch, BaseBatch):
            raise ValueError(
                f"shared_fields names {sorted(self.shared)}, and {containers.type_name(batch)} is a "
                'BaseBatch: mark what its samples share with field(metadata={"per_sample": False})'
            )
        for path in sorted(self.shared - containers.paths(batch)):
            raise ValueError(
                f"shared_fields names {path!r}, which is not in the batch; there are "
                f"{sorted(containers.paths(batch))}"
            )

    def stale_numbers(self, batch: Any) -> list[str]:
        """Returns a warning for each number outside tensors that seems to describe the rows.

        Such a number stays with its rank when the rows move.
        """
        rows, _ = self.batch_rows(batch)
        if isinstance(batch, BaseBatch) or rows == 1:
            return []
        about = {rows: "the rows of the batch"}
        for name, value in self.per_sample_fields(batch).items():
            if not isinstance(value, torch.Tensor) and value.lengths().numel():  # a KJT may have no keys
                about.setdefault(int(value.lengths().max()), f"the longest row of {name}")
                about.setdefault(value.values().shape[0], f"the elements of {name}")
        return [
            f"{path} {relation} {number}, as {about[number]}, and stays when samples move. If it is about "
            "them make it a tensor with one row per sample, or compute it in the forward; else name it in "
            "the shuffler's shared_fields"
            for path, relation, number in containers.plain_sizes(batch, self.shared)
            if number == rows or (relation == "is" and number in about)
        ]


def without_copied_row(output: Any) -> Any:
    """Returns a model's output for a batch whose only row is a copy, with no row in place of one.

    So outputs add up to those of the samples. What has another number of rows, or none, stays: it may be
    about anything.
    """

    def without_row(_: str, leaf: Any) -> Any:
        try:
            field = containers.as_field(leaf)
            rows = num_rows("output", field)
        except (TypeError, ValueError):  # no rows to speak of, as in a number or a sparse tensor
            return leaf
        if rows != 1:
            return leaf
        if isinstance(field, torch.Tensor):
            return containers.like(field[:0], leaf)
        packed = PackedRows.pack({"output": field}, RowSchema.of({"output": field}), 1)
        none = select_from([packed], np.zeros(0, dtype=np.int64)).unpack(0)
        return containers.like(none["output"], leaf)

    try:
        return containers.transformed(output, without_row)
    except TypeError:  # of a type that cannot be made again
        return output


def _common_rows(fields: dict[str, FieldValue]) -> int:
    """The rows that all fields have."""
    rows = {name: num_rows(name, value) for name, value in fields.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"fields have different numbers of rows: {rows}; each needs one row per sample. Name what "
            "all samples share in the shuffler's shared_fields"
        )
    return next(iter(rows.values()))
