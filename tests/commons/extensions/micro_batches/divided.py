"""Checks of plans that divide a step into micro-batches."""

from collections.abc import Sequence

import numpy as np

from commons.distributed import ShufflePlan
from commons.extensions.micro_batches import MicroBatches
from tests.commons.extensions.micro_batches.internals import rows_of_micro_batches


def fewest_for(tokens: Sequence[int] | np.ndarray, cap: int) -> int:
    """⌈tokens ÷ cap⌉, where a sample above the cap counts as a full micro-batch."""
    return -(-int(np.minimum(np.asarray(tokens, dtype=np.int64), cap).sum()) // cap)


def best_fit_decreasing(tokens: Sequence[int] | np.ndarray, cap: int) -> int:
    """The number of micro-batches it needs; a sample above the cap is alone."""
    left: list[int] = []
    for amount in sorted(map(int, tokens), reverse=True):
        if amount > cap:
            left.append(-1)
            continue
        fitting = [number for number, room in enumerate(left) if room >= amount]
        if fitting:
            left[min(fitting, key=left.__getitem__)] -= amount
        else:
            left.append(cap - amount)
    return len(left)


def check_divided(plan: ShufflePlan, cap: int) -> None:
    """Checks that each sample of a rank is in one of few micro-batches, and that these keep to the cap."""
    tokens = [plan.rows.tokens[samples] for samples in plan.partition]
    assert max(1, *(fewest_for(of_rank, cap) for of_rank in tokens)) <= plan.num_parts
    assert plan.num_parts <= max(1, *(best_fit_decreasing(of_rank, cap) for of_rank in tokens))
    for rank, of_rank in enumerate(tokens):
        of_each = rows_of_micro_batches(plan, rank)
        assert len(of_each) == plan.num_parts
        assert all((np.diff(rows) > 0).all() for rows in of_each)
        assert sorted(np.concatenate(of_each).tolist()) == list(range(len(of_rank)))
        assert all(len(rows) == 1 or of_rank[rows].sum() <= cap for rows in of_each)


def in_micro_batches(cap: int | None) -> list[MicroBatches]:
    """Returns the extensions of a shuffler; none without a cap."""
    return [] if cap is None else [MicroBatches(cap)]
