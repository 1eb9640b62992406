"""Figures of all ranks, where samples are balanced among fewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from commons.distributed.balance_report import BalanceReport
from commons.distributed.batch_shuffler import BatchShuffler
from commons.distributed.failures import portable, raise_first, sent_by
from commons.distributed.rank_group import all_gather_object, all_gather_row
from commons.distributed.shuffle_plan import WindowPlan

_HEADER = 3  # whether planning failed, steps, whether the rank has a row for steps without samples
# Of a step: loss tokens, load before and after, tokens before and after, largest workload, samples,
# micro-batches.
_FIGURES = 8


@dataclass(frozen=True)
class Totals:
    """Figures of a window over all ranks.

    Attributes:
        num_steps: of the ranks with the most batches.
        per_rank: float64 `[all ranks, window, 8]`.
        padding_batch: one row, for steps to which this rank's group brings nothing.
    """

    num_steps: int
    per_rank: np.ndarray
    padding_batch: Any

    def loss_tokens(self, step: int) -> int:
        """Of all ranks."""
        return int(self.per_rank[:, step, 0].sum())

    def num_placed(self, step: int) -> np.ndarray:
        """float64 `[all ranks]`, samples that each computes."""
        return self.per_rank[:, step, -2]

    def num_micro_batches(self, step: int) -> int:
        """Of the ranks with the most."""
        return int(self.per_rank[:, step, -1].max())

    @property
    def mean_loss_tokens(self) -> float:
        """Of all ranks, of the mean step."""
        return float(self.per_rank[:, :, 0].sum()) / max(self.num_steps, 1)

    def complete(self, report: BalanceReport, step: int) -> BalanceReport:
        """The report of a step with loads, tokens and bound of all ranks; the rest stays that of a group."""
        _, loads_before, loads_after, tokens_before, tokens_after, largest, *_ = self.per_rank[:, step].T
        mean = loads_after.mean()
        return replace(
            report,
            loads_before=loads_before,
            loads_after=loads_after,
            tokens_before=tokens_before.astype(np.int64),
            tokens_after=tokens_after.astype(np.int64),
            lower_bound=max(1.0, float(largest.max() / mean)) if mean > 0 else 1.0,
        )


class AllRanks:
    """All ranks of the job, for a shuffler that balances among some of them. Made collectively.

    Args:
        window: the most steps that are planned together.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._group = dist.new_group(backend="gloo")
        self._padding_batch: Any = None

    def plan(
        self, shuffler: BatchShuffler, batches: Sequence[Any], failure: Exception | None
    ) -> tuple[WindowPlan, Totals]:
        """The shuffler's plan, and one all-gather of its figures over all ranks.

        Raises:
            Exception: what planning raised on the first rank where it did, on every rank.
        """
        row = np.zeros(_HEADER + self._window * _FIGURES)
        window: WindowPlan | None = None
        try:
            window = shuffler.plan_window(batches, failure)
            if self._padding_batch is None and shuffler.knows_fields:
                self._padding_batch = shuffler.padding_batch()
            row[1:_HEADER] = len(window.steps), self._padding_batch is not None
            row[_HEADER : _HEADER + len(window.steps) * _FIGURES] = _figures(window, shuffler.group.rank)
        except Exception as error:  # raised on all ranks below
            failure, row[0] = error, 1.0
        table = all_gather_row(row, self._group)
        failed, num_steps, has_padding, *_ = table.T
        if window is None or failed.any():
            failures = all_gather_object(portable(failure), self._group)
            raise_first(failures, failure, dist.get_rank())
            raise RuntimeError("planning failed on a rank that gave no cause")
        if has_padding.any() and not has_padding.all():
            # A group that never had a batch goes along with a row of another one's.
            sender, mine = int(has_padding.argmax()), self._padding_batch
            sent = sent_by(sender, mine, dist.get_rank(), lambda value: all_gather_object(value, self._group))
            self._padding_batch = sent if mine is None else mine
        per_rank = table[:, _HEADER:].reshape(-1, self._window, _FIGURES)
        return window, Totals(int(num_steps.max()), per_rank, self._padding_batch)


def _figures(window: WindowPlan, rank: int) -> np.ndarray:
    """float64 `[steps × 7]` of one rank."""
    figures = np.zeros((len(window.steps), _FIGURES))
    for step, plan in enumerate(window.steps):
        loaded = (window.home == rank) & (window.batch_of == step)
        kept = plan.partition[rank]
        figures[step] = (
            plan.loss_tokens[plan.home == rank].sum(),
            window.workloads[loaded].sum(dtype=np.float64),
            plan.workloads[kept].sum(dtype=np.float64),
            window.tokens[loaded].sum(),
            plan.tokens[kept].sum(),
            plan.workloads[kept].max(initial=0),
            len(kept),
            plan.num_micro_batches,
        )
    return figures.ravel()
