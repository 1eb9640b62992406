"""Cuts and placements of samples, drawn from a seed."""

from collections.abc import Callable

import numpy as np

from commons.distributed import ShufflePlan
from commons.extensions.pieces import Pieces
from tests.commons.distributed.internals import Place, RowTable, make_plan
from tests.commons.extensions.pieces.internals import Cutting

# Of samples as loaded: for each cut the sample and the items before it, and for each row the rank.
Cuts = Callable[[RowTable, Cutting], tuple[np.ndarray, np.ndarray, np.ndarray]]


class GivenCuts(Pieces):
    """Cuts and places samples as a function says, which may be exchanged between plans."""

    def __init__(self, cuts: Cuts) -> None:
        super().__init__()
        self.cuts = cuts

    def place(self, rows: RowTable, place: Place) -> ShufflePlan:
        cutting = self._cutting_of(rows)
        numbers, items, ranks = self.cuts(rows, cutting)
        return make_plan(cutting.cut(rows, numbers, items) if len(numbers) else rows, ranks)


class DrawnCuts(GivenCuts):
    """Cuts anywhere and places each row on any rank, by a seed; a rank may have no row, or no piece."""

    def __init__(self, seed: int) -> None:
        super().__init__(self._draw)
        self.seed = seed

    def _draw(self, samples: RowTable, cutting: Cutting) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        last_cut = cutting.rules.last_cut(cutting.counts(samples))
        numbers, items = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for number, last in enumerate(last_cut.tolist()):
            count = min(int(rng.integers(0, 5)) if rng.random() < 0.6 else 0, last)
            numbers.append(np.full(count, number))
            items.append(np.sort(rng.permutation(last)[:count]) + 1)
        cuts = np.concatenate(numbers), np.concatenate(items)
        num_rows = len(last_cut) + len(cuts[0])
        ranks = np.arange(samples.num_ranks)
        allowed = ranks[rng.random(len(ranks)) < 0.7] if rng.random() < 0.5 else ranks
        return *cuts, rng.choice(allowed if len(allowed) else ranks, num_rows)


def is_cut(plan: ShufflePlan) -> bool:
    """Whether the step has a piece of a sample."""
    return not plan.rows.starts_sample.all()
