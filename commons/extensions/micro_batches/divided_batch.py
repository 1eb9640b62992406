"""The micro-batches of a rank's batch, as the plan divides it."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from ...distributed import BatchShuffler, ShufflePlan
from ...distributed.plan import MICRO_BATCH
from ...partition.problem import indices_of_parts
from ...sequence_batch.packed_rows import select_rows
from ...sequence_batch.tree import take_apart
from ..row_objects import RowsWithObjects

Batch = TypeVar("Batch")


def micro_batch_of_rows(plan: ShufflePlan) -> np.ndarray:
    """Returns the micro-batch of each row of a plan, int64 `[rows]`."""
    # If the loaders of all ranks that balance together have ended, nothing was divided.
    return plan.rows.columns.get(MICRO_BATCH, np.zeros(len(plan.destination), dtype=np.int64))


def rows_of_micro_batches(plan: ShufflePlan, rank: int) -> list[np.ndarray]:
    """Returns the ascending rows of each micro-batch in a rank's batch, or `[]` if batches run whole."""
    if not plan.num_parts:
        return []
    return indices_of_parts(micro_batch_of_rows(plan)[plan.computed_by(rank)], plan.num_parts)


def micro_batches(
    shuffler: BatchShuffler, batch: Batch, plan: ShufflePlan
) -> tuple[list[Batch], list[np.ndarray]]:
    """Returns the micro-batches of an exchanged batch as `MicroBatches.micro_batches` does, and the rows of
    the batch in each, int64. A micro-batch without samples has no row if batches know their padding, and
    otherwise the first row."""
    rank, known, view = shuffler.group.rank, plan.rows.format, shuffler.view(batch)
    if not plan.num_parts or known is None:
        return [batch], []
    first = np.zeros(0 if view.pads else 1, dtype=np.int64)
    rows_of_each = [rows if len(rows) else first for rows in rows_of_micro_batches(plan, rank)]
    if not (plan.num_placed[rank] or view.pads):
        # Each micro-batch needs memory of its own, because the model may change it in place.
        return [view.copy().batch for _ in rows_of_each], rows_of_each
    own = plan.computed_by(rank)
    lists = None  # if ranks exchange, lists are equal on all of them, and so are shared
    if not shuffler.exchanges:  # as loaded, including elements in padding rows
        lists = RowsWithObjects(batch, shuffler.shared_fields, view.num_rows)
        lengths = plan.rows.lengths_as_loaded(rank)
    else:
        lengths = np.zeros((view.num_rows, plan.rows.key_lengths.shape[1]), dtype=np.int64)
        lengths[: len(own)] = plan.rows.key_lengths[own]
    packed, parts = view.packed(lengths), []
    for rows in rows_of_each:
        num_rows = max(len(rows), 1)
        fields = select_rows([packed], rows, num_rows)
        counts = known.row_counts(plan.rows, own[rows])
        part = view.replaced(fields, num_rows, len(rows)).with_counts(counts).batch
        if lists is not None:
            part = take_apart(part).rebuilt(lists.with_entries(rows, num_rows).others())
        parts.append(part)
    return parts, rows_of_each
