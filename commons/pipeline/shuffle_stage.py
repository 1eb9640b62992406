"""What a balanced pipeline does to a batch between its loader and its model."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from commons.distributed import BalanceReport, BatchShuffler, ShufflePlan
from commons.sequence_batch import BaseBatch

# What a step returns: the loss sum of this rank, the loss tokens of all ranks, and the model's output.
StepOutput = tuple[torch.Tensor, int, Any]


@dataclass
class _Step:
    """A step on its way; `totals` is of all ranks, where the plan is about fewer."""

    plan: ShufflePlan
    num_loss_tokens: int
    totals: np.ndarray | None
    plan_seconds: float
    exchange_seconds: float = 0.0


class ShuffleStage:
    """Plans host batches, exchanges device batches, and scales the loss, each in the order of the loader.

    Collectives of a step: those of the shuffler's plan and exchange; and where the shuffler does not balance
    among all ranks, one all-gather of seven host numbers for the global count of loss tokens.
    """

    def __init__(self, shuffler: BatchShuffler) -> None:
        self._shuffler = shuffler
        self._num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        covers_all_ranks = shuffler.group.num_ranks == self._num_ranks
        self._all_ranks = None if covers_all_ranks else dist.new_group(backend="gloo")
        self._planned: deque[_Step] = deque()
        self._exchanged: deque[_Step] = deque()
        self._computed: _Step | None = None

    def plan(self, batch: BaseBatch | None) -> BaseBatch | None:
        """Plans one step; collective over all ranks.

        Args:
            batch: this rank's batch on the host, None if its loader has ended.

        Returns:
            The batch to copy to the device: a padding row if only this rank's loader has ended, None if those
            of all ranks have.
        """
        with record_function("## plan ##"):
            start = time.perf_counter()
            plan = self._shuffler.plan(batch)
            totals = None if self._all_ranks is None else self._gather_totals(plan)
            has_batch = plan.has_batch if totals is None else bool(totals[:, 0].any())
            if not has_batch:
                return None
            num_loss_tokens = plan.num_loss_tokens if totals is None else int(totals[:, 1].sum())
            self._planned.append(_Step(plan, num_loss_tokens, totals, time.perf_counter() - start))
        return self._shuffler.padding_batch() if batch is None else batch

    def exchange(self, batch: BaseBatch) -> BaseBatch:
        """Carries out the oldest plan on its device batch; collective over the ranks to balance among."""
        step = self._planned.popleft()
        with record_function("## exchange ##"):
            start = time.perf_counter()
            batch = self._shuffler.exchange(batch, step.plan)
            step.exchange_seconds = time.perf_counter() - start
        self._exchanged.append(step)
        return batch

    def forward(self, model: torch.nn.Module, batch: BaseBatch) -> tuple[torch.Tensor, StepOutput]:
        """Runs the model on the oldest exchanged batch.

        Returns:
            The loss to run backward on, and what the step returns. Data-parallel training averages gradients
            over ranks; the loss is scaled so that this average is the gradient of the mean over all loss
            tokens of the step, whichever rank they are on. Without any loss token it is 0.
        """
        step = self._exchanged.popleft()
        losses, output = model(batch)
        # The sum of many losses in 16 bits would be off by percents.
        loss_sum = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
        scale = self._num_ranks / step.num_loss_tokens if step.num_loss_tokens else 0.0
        self._computed = step
        return loss_sum * scale, (loss_sum.detach(), step.num_loss_tokens, output)

    def reset(self) -> None:
        """Forgets the steps on their way, as a pipeline does that drops its batches."""
        self._planned.clear()
        self._exchanged.clear()

    @property
    def report(self) -> BalanceReport:
        """Of the step that ran last.

        Where the shuffler does not balance among all ranks, loads, tokens and bound are of all ranks, what
        was moved is of the ranks that this one balances with.

        Raises:
            RuntimeError: no step has run.
        """
        if self._computed is None:
            raise RuntimeError("there is no report before the first step")
        step = self._computed
        report = BalanceReport.of(
            step.plan, self._shuffler.equal_rows, step.plan_seconds, step.exchange_seconds
        )
        if step.totals is None:
            return report
        _, _, loads_before, loads_after, tokens_before, tokens_after, largest = step.totals.T
        mean = loads_before.mean()
        return replace(
            report,
            loads_before=loads_before,
            loads_after=loads_after,
            tokens_before=tokens_before.astype(np.int64),
            tokens_after=tokens_after.astype(np.int64),
            lower_bound=max(1.0, float(largest.max() / mean)) if mean > 0 else 1.0,
        )

    def _gather_totals(self, plan: ShufflePlan) -> np.ndarray:
        """float64 `[all ranks, 7]`: whether the rank has a batch, its loss tokens, its load before and after,
        its tokens before and after, and its largest workload."""
        rank = self._shuffler.group.rank
        loaded = plan.home == rank
        kept = plan.partition[rank]
        mine = [
            plan.batch_sizes[rank] > 0,
            plan.loss_tokens[loaded].sum(),
            plan.workloads[loaded].sum(dtype=np.float64),
            plan.workloads[kept].sum(dtype=np.float64),
            plan.tokens[loaded].sum(),
            plan.tokens[kept].sum(),
            plan.workloads[kept].max(initial=0),
        ]
        table = torch.empty(self._num_ranks, len(mine), dtype=torch.float64)
        row = torch.tensor([float(value) for value in mine], dtype=torch.float64)
        dist.all_gather_into_tensor(table.view(-1), row, group=self._all_ranks)
        return table.numpy()
