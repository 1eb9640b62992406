"""The format of batches and of their rows, which ranks agree on at the first batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..perf_model.cost import Cost
from ..sequence_batch.row_schema import FieldValue, Schema
from ..sequence_batch.rows import Rows
from .row_table import RowTable

_NUM_TOKENS = 2  # columns after the workloads: tokens and loss tokens


@dataclass(frozen=True)
class Format:
    """The format of batches and rows in all steps, equal on all ranks except for `pinned` and `batch_type`.

    `count_rows` sets the attributes up to `pads`. Ranks set the others when they agree on the format.

    Attributes:
        schema: schema of the batch's fields.
        num_work: number of columns that `get_workloads` returns.
        count_names: names of the batch's `row_counts`.
        column_names: names of the extensions' columns.
        loss_dtype: dtype of loss tokens, "int64" or "float64".
        pads: whether batches know their padding rows, and so may be padded.
        real_row: fields of one sample, for batches that do not know their padding; else empty.
        agreed: values that the extensions agree on, by extension name.
        padding: the row for ranks without a batch, the same on all ranks.
        pinned: whether this rank's batches are in pinned memory.
        batch_type: type of this rank's batches. None until the rank has one.
    """

    schema: Schema
    num_work: int
    count_names: tuple[str, ...]
    column_names: tuple[str, ...]
    loss_dtype: str = "int64"
    pads: bool = True
    real_row: Mapping[str, FieldValue] = field(default_factory=dict)
    agreed: Mapping[str, Any] = field(default_factory=dict)
    padding: Rows | None = None
    pinned: bool = False
    batch_type: type | None = None

    def __str__(self) -> str:
        others = f", and {', '.join(self.column_names)}" if self.column_names else ""
        weights = ", loss tokens of float64" if self.loss_dtype == "float64" else ""
        counts = f"row_counts of {self.count_names}"
        return f"{self.num_work} columns of get_workloads, {counts}{weights}{others}"

    @property
    def columns(self) -> tuple[Any, ...]:
        """The layout of a row's numbers, apart from its lengths."""
        return self.num_work, self.count_names, self.column_names, self.loss_dtype

    @property
    def width(self) -> int:
        """Number of int64 words per row on the wire."""
        words = -(-(self.schema.num_keys + len(self.count_names)) // 2)  # two int32 per word
        return self.num_work + _NUM_TOKENS + len(self.column_names) + words

    def encode(self, rows: RowTable) -> np.ndarray:
        """Returns the rows as int64 `[rows, width]`."""
        narrow = np.concatenate([rows.key_lengths, rows.row_counts], 1)
        pairs = np.zeros((len(narrow), narrow.shape[1] + narrow.shape[1] % 2), np.int32)
        pairs[:, : narrow.shape[1]] = narrow
        columns = [rows.columns[name][:, None] for name in self.column_names]
        tokens = rows.tokens[:, None], rows.loss_tokens.view(np.int64)[:, None]
        return np.concatenate([rows.work, *tokens, *columns, pairs.view(np.int64)], 1)

    def decode(self, numbers: np.ndarray, per_rank: np.ndarray) -> RowTable:
        """Returns the rows of all ranks. The cost of a row is the sum of its `work` columns.

        Args:
            numbers: int64 `[rows, width]`, rows of all ranks as `encode` returns them.
            per_rank: int64 `[ranks, 2 + keys]`, each rank's rows, real rows, and padding lengths.
        """
        widths = [self.num_work, 1, 1, len(self.column_names)]
        *wide, pairs = np.split(numbers, np.cumsum(widths), axis=1)
        work, tokens, loss_tokens, columns = map(np.ascontiguousarray, wide)
        narrow, num_keys = pairs.view(np.int32), self.schema.num_keys
        key_lengths = narrow[:, :num_keys].astype(np.int64)
        row_counts = narrow[:, num_keys : num_keys + len(self.count_names)].astype(np.int64)
        return RowTable(
            batch_sizes=per_rank[:, 0].copy(),
            num_loaded=per_rank[:, 1].copy(),
            workloads=Cost.sum_of_columns(self.num_work).of(1, tokens[:, 0], work),
            tokens=tokens[:, 0],
            loss_tokens=loss_tokens[:, 0].view(self.loss_dtype),
            key_lengths=key_lengths,
            sample_bytes=self.schema.row_bytes(key_lengths),
            row_counts=row_counts,
            padding_lengths=per_rank[:, 2:].copy(),
            work=work,
            columns=dict(zip(self.column_names, columns.T, strict=True)),
        )

    def padding_rows(self) -> Rows:
        """Returns a copy of the row for a rank without a batch; see `BatchShuffler.padding_batch`."""
        assert self.padding is not None  # set once ranks have agreed
        row = self.padding.copy()  # a model may modify its input in place
        return row.pin_memory() if self.pinned else row

    def make_rows(
        self, like: Rows, fields: dict[str, FieldValue], num_rows: int, row_counts: np.ndarray
    ) -> Rows:
        """Makes a batch of samples, padded to `num_rows`, with the type and shared data of `like`.

        A batch that would be empty holds a copy of a real row. `row_counts` is int64 `[samples, names]`.
        """
        if not (len(row_counts) or like.pads):
            fields, num_rows = self.padding_rows().to(like.device, non_blocking=True).fields, 1
        return self.with_row_counts(like.replaced(fields, num_rows, len(row_counts)), row_counts)

    def with_row_counts(self, rows: Rows, row_counts: np.ndarray) -> Rows:
        """Returns the rows with a batch that holds these counts of real rows, int64 `[samples, names]`."""
        if not self.count_names:
            return rows
        padded = np.zeros((len(self.count_names), rows.num_rows), dtype=np.int64)
        padded[:, : len(row_counts)] = row_counts.T
        made = copy.copy(rows)
        made.batch = rows.batch.with_row_counts(dict(zip(self.count_names, padded, strict=True)))
        # `record_stream` must also reach the tensors that the batch's own KeyedJaggedTensor caches.
        made.fields = {**rows.fields, "features": made.batch.features}
        return made

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
                    f"rank {rank}'s batch has {value} for {name}, but that of {whose} has "
                    f"{self.agreed[name]}; all ranks need the same"
                )
        if other.columns != self.columns:
            raise ValueError(
                f"rank {rank} has a batch with {other}, but {whose} has {self}. All ranks need the same "
                "shuffler and row_counts, in all steps"
            )
        if other.pads != self.pads:
            raise ValueError(
                f"a batch of rank {rank} and that of {whose} are of different types, of which only one knows "
                "its padding rows; all ranks must have batches of one type"
            )
