"""Checks of plans that divide a step into micro-batches."""

from __future__ import annotations

import numpy as np

from commons.distributed import ShufflePlan
from commons.extensions.micro_batches import MicroBatches
from tests.commons.extensions.micro_batches.internals import rows_of_micro_batches


def check_divided(plan: ShufflePlan, cap: int) -> None:
    """Checks that each sample of a rank is in one of its micro-batches, and that these keep to the cap."""
    assert plan.num_parts >= 1
    for rank, samples in enumerate(plan.partition):
        of_rank = rows_of_micro_batches(plan, rank)
        assert len(of_rank) == plan.num_parts
        assert all((np.diff(rows) > 0).all() for rows in of_rank)
        assert sorted(np.concatenate(of_rank).tolist()) == list(range(len(samples)))
        assert all(len(rows) == 1 or plan.rows.tokens[samples[rows]].sum() <= cap for rows in of_rank)


def in_micro_batches(cap: int | None) -> list[MicroBatches]:
    """Returns the extensions of a shuffler; none without a cap."""
    return [] if cap is None else [MicroBatches(cap)]
