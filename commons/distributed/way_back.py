"""What was computed of each sample, returned to the rank and row that the sample was loaded on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from commons.distributed.agreement import check_same_schema
from commons.distributed.exchange import transfer
from commons.distributed.rank_group import RankGroup
from commons.distributed.shuffle_plan import Route, RouteEnd, ShufflePlan, WindowPlan
from commons.sequence_batch.base_batch import num_rows
from commons.sequence_batch.packed_rows import PackedRows, gather_rows, row_elements, select_from
from commons.sequence_batch.row_schema import FieldValue, RowSchema
from commons.sequence_batch.sample_rows import SampleRows

_COUNTS = "elements"


def return_step(values: Any, plan: ShufflePlan, group: RankGroup, sample_rows: SampleRows) -> Any:
    """`BatchShuffler.unshuffle` of one step."""
    rows, _ = _rows_at_home(values, plan, group, sample_rows)
    batch_size = max(int(plan.batch_sizes[group.rank]), 1)
    return _unpacked(_kind(values, plan), rows, batch_size, sample_rows)


def return_window(
    values: Sequence[Any], plan: WindowPlan, group: RankGroup, sample_rows: SampleRows
) -> list[Any]:
    """`BatchShuffler.unshuffle` of a window."""
    if len(values) != len(plan.steps):
        raise ValueError(
            f"unshuffle got values of {len(values)} steps, the window has {len(plan.steps)}: give it a list "
            "with those of each step"
        )
    if not plan.steps:
        return []
    at_home = [
        _rows_at_home(of_step, step, group, sample_rows)
        for of_step, step in zip(values, plan.steps, strict=True)
    ]
    sources, elements = [rows for rows, _ in at_home], np.concatenate([of_step for _, of_step in at_home])
    returned = []
    for batch, batch_size in enumerate(plan.batch_sizes[group.rank].tolist()):
        if batch_size:
            chosen = plan.rows_of_batch(group.rank, batch)
            rows = gather_rows(sources, chosen, elements[chosen].sum(0).tolist())
            returned.append(_unpacked(_kind(values[0], plan.steps[0]), rows, batch_size, sample_rows))
    return returned


def _rows_at_home(
    values: Any, plan: ShufflePlan, group: RankGroup, sample_rows: SampleRows
) -> tuple[PackedRows, np.ndarray]:
    """The real rows that this rank brought to a step, and int64 `[rows, jagged fields]` their elements."""
    rank = group.rank
    held, at_home = plan.partition[rank], plan.loaded_by(rank)
    if plan.micro_batches and isinstance(values, list):
        packed = _joined(values, plan.micro_batches[rank], sample_rows)
    else:
        packed = _packed(values, int(plan.num_placed[rank]), int(plan.rows[rank]), sample_rows)
    if group.num_ranks == 1:
        elements = row_elements(packed.lengths[:, : len(held)].cpu(), packed.schema).numpy()
        return gather_rows([packed], np.arange(len(held)), elements.sum(0).tolist()), elements
    if group.checks is not None:
        check_same_schema(group, packed.schema)
    to, come_from = plan.home[held], plan.destination[at_home]
    elements = row_elements(packed.lengths[:, : len(held)].cpu(), packed.schema).numpy()
    elements_to_come = np.zeros((len(at_home), 0), dtype=np.int64)

    def transferred(sent: PackedRows, elements: np.ndarray, elements_to_come: np.ndarray) -> PackedRows:
        ends = (
            RouteEnd.of(ranks, of_each, sent.schema.row_bytes(of_each), rank, group.num_ranks)
            for ranks, of_each in ((to, elements), (come_from, elements_to_come))
        )
        return transfer(sent, Route(*ends), group, group.way_back)

    if elements.shape[1]:
        # How long they are only the ranks that computed them know.
        counts = {_COUNTS: torch.from_numpy(elements).to(packed.lengths.device)}
        counted = PackedRows.pack(counts, RowSchema.of(counts), len(held))
        counted = transferred(counted, elements[:, :0], elements_to_come)
        elements_to_come = counted.unpack()[_COUNTS].cpu().numpy()
    return transferred(packed, elements, elements_to_come), elements_to_come


def _joined(values: Sequence[Any], rows_of_each: Sequence[np.ndarray], sample_rows: SampleRows) -> PackedRows:
    """The rows of a batch in its order, from what was computed of each of its micro-batches."""
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
    fields = sample_rows.per_sample_fields(values)
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


def _unpacked(values: Any, rows: PackedRows, batch_size: int, sample_rows: SampleRows) -> Any:
    return sample_rows.unpacked(values, rows, batch_size)


def _kind(values: Any, plan: ShufflePlan) -> Any:
    """Values of the kind that is returned."""
    return values[0] if plan.micro_batches and isinstance(values, list) else values
