"""Unshuffle: returns per-sample results to the rank and row that each sample was loaded on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..sequence_batch.base_batch import num_rows
from ..sequence_batch.packed_rows import (
    PackedRows,
    gather_rows,
    row_elements,
    select_from,
    to_device_together,
)
from ..sequence_batch.row_schema import FieldValue, RowSchema
from ..sequence_batch.sample_rows import SampleRows
from .channel import Channel
from .exchange import transfer
from .rank_group import RankGroup
from .shuffle_plan import Route, RouteEnd, ShufflePlan
from .verify import check_same_schema

_COUNTS = "elements"


class KindsOfValues:
    """The kinds of values that ranks return, each compared at its first call.

    Args:
        channel: of the ranks; for the main thread.
        every_call: whether to compare at later calls, too.
    """

    def __init__(self, channel: Channel, every_call: bool) -> None:
        self._channel, self._every_call = channel, every_call
        self._agreed: set[RowSchema] = set()

    def check(self, schema: RowSchema) -> None:
        """Checks that all ranks return values of this kind. Collective where the kind is new.

        Raises:
            ValueError: they differ; on every rank.
        """
        if self._every_call or schema not in self._agreed:
            check_same_schema(self._channel, schema)
            self._agreed.add(schema)


def return_values(
    values: Any,
    plan: ShufflePlan,
    group: RankGroup,
    sample_rows: SampleRows,
    kinds: KindsOfValues,
) -> Any:
    """Returns the values to the batch that this rank loaded; one row if it had none. Collective.

    Args:
        values: as `BatchShuffler.unshuffle` takes them.
        plan: the placement within the group.
        group: the ranks.
        sample_rows: reads the rows of values.
        kinds: for ranks to agree on what they return.
    """
    rows = _rows_at_home(values, plan, group, sample_rows, kinds)
    num_rows = int(plan.batch_sizes[group.rank])
    if plan.pieces is not None:
        starts = plan.starts_sample[plan.loaded_by(group.rank)]
        rows = _joined_pieces(rows, starts)
        num_rows -= int((~starts).sum())
    kind = values[0] if plan.in_micro_batches and isinstance(values, list) else values
    return sample_rows.unpacked(kind, rows, max(num_rows, 1))


def _joined_pieces(rows: PackedRows, starts: np.ndarray) -> PackedRows:
    """Joins the rows of each sample's pieces: jagged values one after another, dense ones of the last piece.

    Args:
        rows: in the order of the pieces.
        starts: bool `[rows]`, whether a row is the first of its sample.
    """
    first = np.flatnonzero(starts)
    last = np.append(first[1:], len(starts))[: len(first)] - 1
    sample_of, last_row = to_device_together([np.cumsum(starts) - 1, last], rows.lengths.device)
    lengths = rows.lengths.new_zeros(rows.lengths.shape[0], len(first))
    sections = [
        words.index_select(0, last_row) if section.is_dense else words
        for section, words in zip(rows.schema.sections, rows.sections, strict=True)
    ]
    return replace(
        rows,
        num_rows=len(first),
        lengths=lengths.index_add_(1, sample_of, rows.lengths),
        sections=sections,
    )


def _rows_at_home(
    values: Any, plan: ShufflePlan, group: RankGroup, sample_rows: SampleRows, kinds: KindsOfValues
) -> PackedRows:
    """Returns the values of the real rows that this rank loaded, in their order."""
    rank = group.rank
    held, at_home = plan.computed_by(rank), plan.loaded_by(rank)
    if plan.in_micro_batches and isinstance(values, list):
        packed = _joined(values, plan.micro_batches_on(rank), sample_rows)
    else:
        packed = _packed(values, int(plan.num_placed[rank]), int(plan.rows[rank]), sample_rows)
    elements = row_elements(packed.lengths[:, : len(held)].cpu(), packed.schema).numpy()
    if group.num_ranks == 1:
        return gather_rows([packed], np.arange(len(held)), elements.sum(0).tolist())
    kinds.check(packed.schema)
    to, come_from = plan.home[held], plan.destination[at_home]
    elements_to_come = np.zeros((len(at_home), 0), dtype=np.int64)

    def transferred(sent: PackedRows, elements: np.ndarray, elements_to_come: np.ndarray) -> PackedRows:
        ends = (
            RouteEnd.of(ranks, of_each, sent.schema.row_bytes(of_each), rank, group.num_ranks)
            for ranks, of_each in ((to, elements), (come_from, elements_to_come))
        )
        return transfer(sent, Route(*ends), rank, group.unshuffle_group(sent.lengths.device))

    if elements.shape[1]:
        # Only the ranks that computed them know how long they are.
        counts = {_COUNTS: torch.from_numpy(elements).to(packed.lengths.device)}
        counted = PackedRows.pack(counts, RowSchema.of(counts), len(held))
        counted = transferred(counted, elements[:, :0], elements_to_come)
        elements_to_come = counted.unpack()[_COUNTS].cpu().numpy()
    return transferred(packed, elements, elements_to_come)


def _joined(values: Sequence[Any], rows_of_each: Sequence[np.ndarray], sample_rows: SampleRows) -> PackedRows:
    """Puts the values of micro-batches in the order of their batch's rows."""
    if len(values) != len(rows_of_each):
        raise ValueError(
            f"unshuffle got values of {len(values)} micro-batches, the plan has {len(rows_of_each)}: give it "
            "a list with those of each"
        )
    sources = [
        _packed(of_one, len(rows), max(len(rows), 1), sample_rows)
        for of_one, rows in zip(values, rows_of_each, strict=True)
    ]
    for number, source in enumerate(sources):
        if difference := sources[0].schema.difference(source.schema):
            raise ValueError(
                f"unshuffle got other values of micro-batch {number} than of the first: {difference}"
            )
    ends = np.cumsum([source.num_rows for source in sources])
    found = [
        end - source.num_rows + np.arange(len(rows))
        for end, source, rows in zip(ends, sources, rows_of_each, strict=True)
    ]
    return select_from(sources, np.concatenate(found)[np.argsort(np.concatenate(rows_of_each))])


def _packed(values: Any, num_real: int, num_padded: int, sample_rows: SampleRows) -> PackedRows:
    fields = dict(sorted(sample_rows.per_sample_fields(values).items()))  # the same order on every rank
    return PackedRows.pack(fields, RowSchema.of(fields), _checked_rows(fields, num_real, num_padded))


def _checked_rows(fields: dict[str, FieldValue], num_real: int, num_padded: int) -> int:
    sizes = {name: num_rows(name, value) for name, value in fields.items()}
    for name, rows in sizes.items():
        if rows not in (num_real, num_padded) or rows != next(iter(sizes.values())):
            raise ValueError(
                f"unshuffle got {rows} rows in {name or 'values'!r}, expected {num_padded}, as the exchange "
                f"gave this rank, or {num_real} without the padding"
            )
    return next(iter(sizes.values()))
