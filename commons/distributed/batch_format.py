"""The format of batches and of their rows, which ranks agree on at the first batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..perf_model.cost import Cost
from .row_table import RowTable

if TYPE_CHECKING:
    from ..sequence_batch.row_schema import Schema


@dataclass(frozen=True)
class Format:
    """The format of batches and rows in all steps, equal on all ranks.

    Attributes:
        schema: schema of the batch's fields.
        num_work: number of columns that `get_workloads` returns.
        count_names: names of the batch's `row_counts`.
        column_names: names of the columns of a row: `count_names`, and then those of the extensions.
        loss_dtype: dtype of loss tokens, "int64" or "float64".
        pads: whether batches know their padding rows, and so may be padded.
        agreed: values that the extensions agree on, by extension name.
    """

    schema: Schema
    num_work: int
    count_names: tuple[str, ...] = ()
    column_names: tuple[str, ...] = ()
    loss_dtype: str = "int64"
    pads: bool = True
    agreed: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        columns = f", and {', '.join(self.column_names)}" if self.column_names else ""
        weights = ", loss tokens of float64" if self.loss_dtype == "float64" else ""
        return f"{self.num_work} columns of get_workloads{weights}{columns}"

    def row(self, is_wide: bool) -> np.dtype:
        """The numbers of a row. Unless it is wide, tokens and whole loss tokens take 4 bytes."""
        tokens = np.int64 if is_wide else np.int32
        return np.dtype(
            [
                ("work", np.int64, (self.num_work,)),
                ("tokens", tokens),
                ("loss_tokens", tokens if self.loss_dtype == "int64" else self.loss_dtype),
                ("columns", np.int64, (len(self.column_names),)),
                ("key_lengths", np.int32, (self.schema.num_keys,)),
            ]
        )

    def message(self, posts: np.dtype, num_rows: int, is_wide: bool = False) -> np.dtype:
        """The numbers that a rank sends for a step.

        `facts` is a hash of its batch's plain values. A batch has at least one row, so a `num_rows` of 0
        means that a rank has no batch.
        """
        return np.dtype(
            [
                *((name, np.int64) for name in ("failed", "is_wide", "facts", "num_rows", "num_real")),
                ("padding_lengths", np.int64, (self.schema.num_keys,)),
                ("posts", posts),
                ("rows", self.row(is_wide), (num_rows,)),
            ]
        )

    def table(self, messages: np.ndarray) -> RowTable:
        """Returns the rows of all ranks, from their messages, `[ranks]`. A row costs the sum of its work."""
        is_real = np.arange(messages["rows"].shape[1]) < messages["num_real"][:, None]
        rows = messages["rows"][is_real]
        key_lengths, tokens = (rows[name].astype(np.int64) for name in ("key_lengths", "tokens"))
        work, columns = (np.ascontiguousarray(rows[name]) for name in ("work", "columns"))
        return RowTable(
            batch_sizes=messages["num_rows"].copy(),
            num_loaded=messages["num_real"].copy(),
            workloads=Cost.sum_of_columns(self.num_work).of(1, tokens, work),
            tokens=tokens,
            loss_tokens=rows["loss_tokens"].astype(self.loss_dtype),
            key_lengths=key_lengths,
            sample_bytes=self.schema.row_bytes(key_lengths),
            padding_lengths=messages["padding_lengths"].copy(),
            work=work,
            columns=dict(zip(self.column_names, columns.T, strict=True)),
            format=self,
        )

    def row_counts(self, rows: RowTable, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Returns what `BaseBatch.row_counts_on_host` does, for the rows with these numbers."""
        counts = {name: rows.columns[name][numbers] for name in self.count_names}
        return self.schema.by_name(rows.key_lengths[numbers]) | counts

    def check_same(self, first: int | None, rank: int, other: Format) -> None:
        """Checks that `rank`'s format `other` equals this one, of rank `first` (None means the first batch).

        Raises:
            ValueError: the formats differ.
        """
        whose = "the first batch" if first is None else f"rank {first}"
        if other.schema != self.schema:
            raise ValueError(
                f"rank {rank} has a batch that differs from that of {whose}: "
                f"{self.schema.difference(other.schema)}; batches of all ranks and steps must have the same "
                "fields, keys, dtypes and trailing shapes. Give an empty or zero tensor for a field that a "
                "step lacks. To change fields for good, make a new shuffler, and a new pipeline with it"
            )
        for name, value in other.agreed.items():
            if value != self.agreed[name]:
                raise ValueError(
                    f"rank {rank}'s batch has {value} for {name}, but that of {whose} has {self.agreed[name]}"
                )
        if str(other) != str(self):
            raise ValueError(
                f"rank {rank} has a batch with {other}, but {whose} has {self}. All ranks need the same "
                "shuffler and row_counts, in all steps"
            )
        if other.pads != self.pads:
            raise ValueError(
                f"a batch of rank {rank} and that of {whose} are of different types, of which only one knows "
                "its padding rows; all ranks must have batches of one type"
            )
