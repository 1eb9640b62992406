"""The rows of any batch: a `BaseBatch`, or any container of tensors with one row per sample."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.sequence_batch import containers
from commons.sequence_batch.base_batch import BaseBatch, num_rows
from commons.sequence_batch.packed_rows import PackedRows, select_from
from commons.sequence_batch.row_schema import FieldValue, RowSchema

Batch = TypeVar("Batch")
# Integers in which squares and FLOPs of lengths wrap.
NARROW_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32)


def knows_padding(batch: Any) -> bool:
    """Whether the batch itself says which of its rows are padding; any other is never padded."""
    return isinstance(batch, BaseBatch)


class SampleRows:
    """Reads, selects and replaces the rows of batches.

    Args:
        shared: paths of what all samples of a batch share, as in "context.temperature" or "[2]".

    Raises:
        TypeError: `shared` is a string.
    """

    def __init__(self, shared: Collection[str] = ()) -> None:
        if isinstance(shared, str):
            raise TypeError(f"shared_fields is {shared!r}; expected a tuple of paths, as in ({shared!r},)")
        self.shared = frozenset(shared)

    def per_sample_fields(self, batch: Any) -> dict[str, FieldValue]:
        """The fields that travel with the samples, by path; each has one row per row of the batch.

        A jagged nested tensor counts as a JaggedTensor, a KeyedTensor as a tensor `[rows, width]`.

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
            "commons.sequence_batch.register_batch_type"
        )

    def batch_rows(self, batch: Any) -> tuple[int, int]:
        """Rows of a batch, and how many of them are samples: all, where it does not know its padding.

        Raises:
            ValueError: the fields disagree.
        """
        if isinstance(batch, BaseBatch):
            return batch.batch_size, batch.num_samples
        rows = {name: num_rows(name, value) for name, value in self.per_sample_fields(batch).items()}
        if len(set(rows.values())) > 1:
            raise ValueError(
                f"fields have different numbers of rows: {rows}; each needs one row per sample. Name what "
                "all samples share in the shuffler's shared_fields"
            )
        (of_all,) = set(rows.values())
        return of_all, of_all

    def with_rows(
        self, batch: Batch, fields: dict[str, FieldValue], batch_size: int, num_samples: int
    ) -> Batch:
        """A batch of the same kind with other rows; what is not in `fields` stays."""
        if isinstance(batch, BaseBatch):
            return batch.with_fields(fields, batch_size, num_samples)

        return containers.with_fields(batch, fields)

    def num_tokens(self, batch: Any) -> torch.Tensor:
        """`[batch_size]` int64: tokens of each row; of a batch that does not say, its jagged elements."""
        if isinstance(batch, BaseBatch):
            return batch.num_tokens()
        rows, _ = self.batch_rows(batch)
        tokens = torch.zeros(rows, dtype=torch.int64, device=self.device_of(batch))
        for value in self.per_sample_fields(batch).values():
            if not isinstance(value, torch.Tensor):
                tokens += value.lengths().view(-1, rows).sum(0)
        return tokens

    def num_loss_tokens(self, batch: Any) -> torch.Tensor:
        """`[batch_size]` int64: loss tokens of each row; of a batch that does not say, one."""
        if isinstance(batch, BaseBatch):
            return batch.num_loss_tokens()
        return torch.ones(self.batch_rows(batch)[0], dtype=torch.int64, device=self.device_of(batch))

    def packed(self, batch: Any) -> PackedRows:
        """All rows of a batch as machine words; no host-device synchronization."""
        fields = self.per_sample_fields(batch)
        return PackedRows.pack(fields, RowSchema.of(fields), self.batch_rows(batch)[0])

    def row_or_padding(self, batch: Batch) -> Batch:
        """Returns one row for a rank without samples, of a host batch with at least one.

        It is padding where the batch knows padding, else a copy of the first row.
        """
        chosen = np.zeros(0 if knows_padding(batch) else 1, dtype=np.int64)
        return self.with_rows(batch, select_from([self.packed(batch)], chosen).unpack(1), 1, len(chosen))

    def copied(self, batch: Batch) -> Batch:
        """The batch with rows in memory of their own."""
        rows = self.packed(batch)
        copied = select_from([rows], np.arange(rows.num_rows))
        return self.with_rows(batch, copied.unpack(), *self.batch_rows(batch))

    def with_long_lengths(self, batch: Batch) -> Batch:
        """The batch with lengths in int64, so that what a user computes of them does not wrap."""
        widened = {
            path: _with_long_lengths(value)
            for path, value in self.per_sample_fields(batch).items()
            if not isinstance(value, torch.Tensor) and value.lengths().dtype in NARROW_INTEGERS
        }
        return self.with_rows(batch, widened, *self.batch_rows(batch)) if widened else batch

    def device_of(self, batch: Any) -> torch.device:
        """Where a batch's rows are."""
        value = next(iter(self.per_sample_fields(batch).values()))
        return value.device if isinstance(value, torch.Tensor) else value.values().device

    def on_host(self, batch: Batch) -> Batch:
        """The batch itself if it is on the host, else a copy, for which it waits."""
        host = torch.device("cpu")
        return batch if self.device_of(batch) == host else containers.moved_to(batch, host)

    def is_pinned(self, batch: Any) -> bool:
        """Whether a batch's rows are in pinned memory."""
        value: Any = next(iter(self.per_sample_fields(batch).values()))
        return (value if isinstance(value, torch.Tensor) else value.values()).is_pinned()

    def pinned_like(self, batch: Batch, model: Any) -> Batch:
        """The batch in pinned memory if `model` is, so that its copy to the device need not wait."""
        return containers.pinned(batch) if self.is_pinned(model) else batch

    def check_shared(self, batch: Any) -> None:
        """Checks the names in `shared` against a batch.

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
        """One line for each number outside tensors that may be about the rows, and stays when they move."""
        rows, _ = self.batch_rows(batch)
        if isinstance(batch, BaseBatch) or rows == 1:
            return []
        about = {rows: "the rows of the batch"}
        for name, value in self.per_sample_fields(batch).items():
            if not isinstance(value, torch.Tensor):
                about.setdefault(int(value.lengths().max()), f"the longest row of {name}")
                about.setdefault(value.values().shape[0], f"the elements of {name}")
        return [
            f"{path} {relation} {number}, as {about[number]}, and stays when samples move. If it is about "
            "them make it a tensor with one row per sample, or compute it in the forward; else name it in "
            "the shuffler's shared_fields"
            for path, relation, number in containers.plain_sizes(batch, self.shared)
            if number == rows or (relation == "is" and number in about)
        ]


def _with_long_lengths(value: JaggedTensor | KeyedJaggedTensor) -> FieldValue:
    parts = {
        "values": value.values(),
        "weights": value.weights_or_none(),
        "lengths": value.lengths().long(),
    }
    if isinstance(value, KeyedJaggedTensor):
        return KeyedJaggedTensor(keys=value.keys(), stride=value.stride(), **parts)
    return JaggedTensor(**parts)
