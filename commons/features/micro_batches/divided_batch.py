"""The micro-batches of a rank's batch, as its plan divides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from ...distributed import BatchShuffler, ShufflePlan
from ...partition.problem import indices_of_parts
from ...sequence_batch.packed_rows import gather_rows, select_from

Batch = TypeVar("Batch")
# The column of a plan's rows with the micro-batch of each, and how many every rank runs.
COLUMN, COUNT = "micro_batch", "num_micro_batches"


def rows_of_micro_batches(plan: ShufflePlan, rank: int) -> list[np.ndarray]:
    """Returns the ascending rows of each micro-batch in a rank's batch; none where batches run whole."""
    if COUNT not in plan.step:
        return []
    return indices_of_parts(plan.rows.columns[COLUMN][plan.computed_by(rank)], plan.step[COUNT])


def micro_batch_rows(shuffler: BatchShuffler, batch: Any, plan: ShufflePlan) -> list[np.ndarray]:
    """Returns the rows of the exchanged batch in each micro-batch, int64; the first for one without samples,
    but none where the batch knows padding."""
    first = np.zeros(0 if shuffler.view(batch).pads else 1, dtype=np.int64)
    return [rows if len(rows) else first for rows in rows_of_micro_batches(plan, shuffler.group.rank)]


def micro_batches(shuffler: BatchShuffler, batch: Batch, plan: ShufflePlan) -> list[Batch]:
    """Returns the micro-batches of an exchanged batch, in order; the batch alone if the plan has none.

    Each has its samples in the order of the batch, and no padding. One without samples has one row: padding,
    or the first of the batch. No host-device synchronization.
    """
    rank, batch_format = shuffler.group.rank, shuffler.format
    if COUNT not in plan.step or batch_format is None:
        return [batch]
    view = shuffler.view(batch)
    if not (plan.num_placed[rank] or view.pads):
        # A rank without samples runs its only row once for each micro-batch.
        return [batch] * plan.step[COUNT]
    packed, own = view.packed(), plan.computed_by(rank)
    elements, row_counts = plan.rows.num_elements[own], plan.rows.row_counts[own]
    parts = []
    for rows in micro_batch_rows(shuffler, batch, plan):
        selected = gather_rows([packed], rows, elements[rows].sum(0).tolist())
        parts.append(batch_format.make_batch(view, selected, max(len(rows), 1), row_counts[rows]))
    return parts


def join_values(shuffler: BatchShuffler, values: Sequence[Any], plan: ShufflePlan) -> Any:
    """Puts per-sample values of micro-batches in the order of their batch's samples.

    One host-device synchronization.

    Args:
        shuffler: that exchanged the batch.
        values: of each micro-batch, with a row for each of its samples, or one of padding without any.
        plan: of the exchange.

    Raises:
        ValueError: there are more or fewer than micro-batches, with other rows, or of different kinds.
    """
    rows_of_each = rows_of_micro_batches(plan, shuffler.group.rank)
    if len(values) != len(rows_of_each):
        raise ValueError(
            f"got values of {len(values)} micro-batches, the plan has {len(rows_of_each)}: give a list with "
            "those of each"
        )
    sources = []
    for number, (part_values, rows) in enumerate(zip(values, rows_of_each, strict=True)):
        view = shuffler.view(part_values)
        found = view.num_rows
        if found not in (len(rows), max(len(rows), 1)):
            raise ValueError(f"got {found} rows of micro-batch {number}, which has {len(rows)} samples")
        sources.append(view.packed())
        if difference := sources[0].schema.difference(sources[number].schema):
            raise ValueError(f"got other values of micro-batch {number} than of the first: {difference}")
    ends = np.cumsum([source.num_rows for source in sources])
    places = [
        end - source.num_rows + np.arange(len(rows))
        for end, source, rows in zip(ends, sources, rows_of_each, strict=True)
    ]
    joined = select_from(sources, np.concatenate(places)[np.argsort(np.concatenate(rows_of_each))])
    view = shuffler.view(values[0])
    return view.unpack(joined, int(plan.num_rows[shuffler.group.rank]) if view.pads else joined.num_rows)
