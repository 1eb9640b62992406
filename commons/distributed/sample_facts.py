"""Facts about one rank's samples, read from its batch on the host: all that planning needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..perf_model.cost import Cost
from ..sequence_batch.packed_rows import check_jagged_fields, key_lengths, row_elements
from ..sequence_batch.row_schema import FieldValue, RowSchema
from ..sequence_batch.sample_rows import NARROW_INTEGERS, SampleRows
from .loaded_samples import LoadedSamples

_NUM_TOKENS = 2  # after the workloads of a sample: its tokens and loss tokens
Counter = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class SampleColumns:
    """Columns of numbers per sample besides the elements of its jagged fields; the same on all ranks.

    Attributes:
        work: columns of `get_workloads`.
        count_names: names of the batch's `row_counts`.
        has_groups: whether samples have groups.
    """

    work: int
    count_names: tuple[str, ...]
    has_groups: bool

    def __str__(self) -> str:
        groups = "groups" if self.has_groups else "no groups"
        return f"{self.work} columns of get_workloads, row_counts of {self.count_names}, and {groups}"

    def width(self, schema: RowSchema) -> int:
        """Returns how many numbers of each sample `SampleFacts.per_sample` has."""
        words = _num_words(self.count_names)
        return self.work + _NUM_TOKENS + self.has_groups + len(schema.jagged_fields) + words


@dataclass(frozen=True)
class SampleFacts:
    """Facts about one rank's batch.

    Attributes:
        schema: the fields of the batch.
        columns: what is known of each sample besides.
        per_sample: int64 `[samples, columns]`: columns of `get_workloads`, tokens, loss tokens, the group if
            there are any, elements of each jagged field, and `row_counts`, two to a word.
        batch_size: rows with padding; `per_sample` has the real ones.
    """

    schema: RowSchema
    columns: SampleColumns
    per_sample: np.ndarray
    batch_size: int

    @staticmethod
    def of(
        batch: Any,
        sample_rows: SampleRows,
        counts_of_rows: Mapping[str, Counter],
        groups_of_rows: tuple[str, Counter] | None = None,
    ) -> SampleFacts:
        """Reads the facts from a batch on the host.

        Args:
            batch: this rank's.
            sample_rows: reads its rows.
            counts_of_rows: functions that return workloads, tokens, and loss tokens of each row, all
                `[batch_size]`, in this order, by the names that messages call them. Workloads may be
                `[batch_size, columns]`. They see int64 lengths.
            groups_of_rows: likewise the group of each row; None if samples have none.

        Raises:
            ValueError: counts of the wrong length, in a dtype that wraps, negative, NaN or infinite; groups
                that are not one integer per row; lengths that do not account for the batch's values; or a
                field that requires a gradient.
        """
        fields = sample_rows.per_sample_fields(batch)
        check_jagged_fields(fields)
        _check_detached(fields)
        schema = RowSchema.of(fields)
        num_rows, num_real = sample_rows.batch_rows(batch)
        if num_rows == 0:
            raise ValueError(
                "a batch of this rank has no rows: skip it in the loader; ranks may have fewer batches"
            )
        shown = sample_rows.with_long_lengths(batch)
        counts: list[torch.Tensor] = []
        for whose, count in counts_of_rows.items():
            checks = checked_counts if counts else checked_work  # workloads come first
            counts.append(checks(_called(count, shown, whose), num_rows, num_real, whose))
        if groups_of_rows is not None:
            whose, count = groups_of_rows
            counts.append(checked_groups(_called(count, shown, whose), num_rows, whose))
        elements = row_elements(key_lengths(fields, schema, num_rows), schema)
        numbers = torch.cat([torch.column_stack(counts), elements], 1)[:num_real]
        row_counts = sample_rows.row_counts(shown)
        columns = SampleColumns(counts[0].shape[1], tuple(row_counts), groups_of_rows is not None)
        words = _words_of(row_counts, num_rows, num_real, type(batch).__name__)
        return SampleFacts(schema, columns, np.concatenate([numbers.numpy(), words], 1), num_rows)


def _check_detached(fields: Mapping[str, FieldValue]) -> None:
    """Refuses fields that require a gradient, which would end where their samples are sent."""
    for name, value in fields.items():
        parts = (value,) if isinstance(value, torch.Tensor) else (value.values(), value.weights_or_none())
        if any(part is not None and part.requires_grad for part in parts):
            raise ValueError(
                f"field {name!r} requires a gradient, which does not travel with its samples: detach it in "
                "the loader, and call requires_grad_ after the exchange if the model needs it"
            )


def _num_words(count_names: Iterable[str]) -> int:
    """Returns the words that row counts take, two to each."""
    return -(-len(tuple(count_names)) // 2)


def loaded_samples(
    per_sample: np.ndarray,
    batch_sizes: np.ndarray,
    num_loaded: np.ndarray,
    schema: RowSchema,
    columns: SampleColumns,
) -> LoadedSamples:
    """Returns the samples of all ranks; the cost of each is the sum of its workloads' columns.

    Args:
        per_sample: as `SampleFacts` has it, of all ranks, one after another.
        batch_sizes, num_loaded: int64 `[ranks]`.
        schema, columns: of all batches.
    """
    group = columns.work + _NUM_TOKENS
    tokens, loss_tokens = per_sample[:, columns.work : group].T.copy()
    work = per_sample[:, : columns.work].copy()
    first_element = group + columns.has_groups
    first_word = first_element + len(schema.jagged_fields)
    num_elements = per_sample[:, first_element:first_word].copy()
    pairs = np.ascontiguousarray(per_sample[:, first_word:]).view(np.int32)
    return LoadedSamples(
        batch_sizes=batch_sizes,
        num_loaded=num_loaded,
        workloads=Cost.sum_of_columns(columns.work).of(1, tokens, work),
        tokens=tokens,
        loss_tokens=loss_tokens,
        num_elements=num_elements,
        sample_bytes=schema.row_bytes(num_elements),
        row_counts=pairs[:, : len(columns.count_names)].astype(np.int64),
        groups=per_sample[:, group].copy() if columns.has_groups else None,
        work=work,
    )


def _words_of(
    row_counts: Mapping[str, torch.Tensor], num_rows: int, num_real: int, batch_type: str
) -> np.ndarray:
    """Checks row counts, and packs those of real rows two to an int64, `[samples, words]`."""
    pairs = np.zeros((num_real, 2 * _num_words(row_counts)), dtype=np.int32)
    for column, (name, counts) in enumerate(row_counts.items()):
        if counts.shape != (num_rows,):
            raise ValueError(
                f"{batch_type}.row_counts()[{name!r}] has shape {tuple(counts.shape)}, expected one number "
                f"per row: ({num_rows},)"
            )
        of_samples = counts[:num_real].numpy()
        pairs[:, column] = of_samples
        wrong = (pairs[:, column] != of_samples) | (pairs[:, column] < 0)  # wrapped, rounded or negative
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"{batch_type}.row_counts()[{name!r}] has {of_samples[row]} for row {row}; expected an "
                "integer from 0 to 2**31 - 1"
            )
    return pairs.view(np.int64)


def _called(count: Counter, batch: Any, whose: str) -> Any:
    try:
        return count(batch)
    except StopIteration as error:  # further up it would look like the end of the data
        raise RuntimeError(f"{whose} raised {error!r}") from error


def checked_work(returned: Any, num_rows: int, num_real: int, whose: str) -> torch.Tensor:
    """Returns int64 `[rows, columns]` from a user's workloads, `[rows]` or `[rows, columns]`.

    Raises:
        ValueError: as `checked_counts`, for the first column that is at fault.
    """
    if not isinstance(returned, torch.Tensor | np.ndarray) or returned.ndim != 2 or not returned.shape[1]:
        return checked_counts(returned, num_rows, num_real, whose)[:, None]
    columns = [returned[:, column] for column in range(returned.shape[1])]
    return torch.stack([checked_counts(column, num_rows, num_real, whose) for column in columns], 1)


def checked_counts(returned: Any, num_rows: int, num_real: int, whose: str) -> torch.Tensor:
    """Returns int64 `[rows]` from a user's counts, with 0 for padding rows.

    Raises:
        ValueError: not a non-negative integer for each row; the message calls the counts `whose`.
    """
    try:
        values = torch.as_tensor(returned).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{whose} returned {type(returned).__name__}, expected integers") from error
    if values.is_complex() or values.dtype == torch.uint64:
        raise ValueError(f"{whose} returned {values.dtype}, expected integers")
    if values.dtype in NARROW_INTEGERS:
        raise ValueError(
            f"{whose} returned {values.dtype}, in which squares and FLOPs wrap without a word; compute in "
            "int64, as in tokens.long() ** 2"
        )
    if values.shape != (num_rows,):
        of_keys = values.dim() == 1 and num_rows and len(values) % num_rows == 0
        raise ValueError(
            f"{whose} returned shape {tuple(values.shape)}, expected one number per row: ({num_rows},)"
            + ("; lengths() of a KeyedJaggedTensor has all keys, one after the other" if of_keys else "")
        )
    real = values[:num_real]
    whole = torch.ones_like(real, dtype=torch.bool)
    if real.is_floating_point():  # NaN equals nothing; infinity is too large
        whole = (real == real.round()) & (real < 2.0**63)
    bad = torch.nonzero(~(whole & (real >= 0)))
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"{whose} returned {real[row].item()} for row {row}, "
            "expected an integer of at least 0, below 2**63; scale fractions up and round them"
        )
    checked = torch.zeros(num_rows, dtype=torch.int64)
    checked[:num_real] = real
    return checked


def checked_groups(returned: Any, num_rows: int, whose: str) -> torch.Tensor:
    """Returns int64 `[rows]` from a user's groups.

    Raises:
        ValueError: not one integer for each row; the message calls the groups `whose`.
    """
    is_tensor = isinstance(returned, torch.Tensor)
    if not is_tensor or returned.shape != (num_rows,) or returned.dtype not in (torch.int32, torch.int64):
        kind = f"{returned.dtype} of {tuple(returned.shape)}" if is_tensor else type(returned).__name__
        raise ValueError(
            f"{whose} returned {kind}; expected an int64 or int32 tensor with a group for each row, "
            f"({num_rows},)"
        )
    return returned.detach().cpu().long()
