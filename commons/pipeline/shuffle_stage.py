"""What a balanced pipeline does to a batch between its loader and its model."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed import BalanceReport, BatchShuffler, ShufflePlan, WindowPlan
from commons.distributed.all_ranks import AllRanks
from commons.distributed.loss_reduction import check_global_mean, check_reduction, loss_sum
from commons.distributed.plan_ahead import PlanAhead
from commons.named_ranges import named_range
from commons.pipeline.compute_clock import ComputeClock, ComputeSpan
from commons.pipeline.micro_batch_forward import losses_and_output, run_micro_batches
from commons.sequence_batch.sample_rows import knows_padding

logger = logging.getLogger(__name__)

# What a step returns: the loss sum of this rank, the loss tokens of all ranks, and the model's output.
StepOutput = tuple[torch.Tensor, int, Any]


@dataclass(frozen=True)
class _Step:
    """A step on its way.

    Attributes:
        batch: what this rank brings to it; on the host until it is copied.
        plan: the placement.
        window: the placement of all steps that were planned together.
        loss_tokens: of all ranks, where the plan may be about fewer.
        mean_loss_tokens: the same, of the mean step of the window.
        report: what is known of the step by now.
    """

    batch: Any
    plan: ShufflePlan
    window: WindowPlan
    loss_tokens: int
    mean_loss_tokens: float
    report: BalanceReport


class ShuffleStage:
    """Plans host batches ahead, exchanges device batches, and scales the loss, in the order of the loader.

    Collectives of a step on the main thread: that of the shuffler's exchange. In the planning thread, for
    each window: that of the shuffler's plan; and where the shuffler does not balance among all ranks, one
    all-gather of a few host numbers, for the global count of loss tokens.

    Args:
        shuffler: what places samples on ranks; it serves this stage alone, until `reset` or the loaders' end.
        device: where batches are copied to.
        loss_reduction: one of `LOSS_REDUCTIONS`, as pipelines take it.

    Raises:
        TypeError: `shuffler` is none.
        ValueError: an unknown reduction, or "global_mean" with micro-batches or a window.
    """

    def __init__(self, shuffler: BatchShuffler, device: torch.device, loss_reduction: str | None) -> None:
        if not isinstance(shuffler, BatchShuffler):
            raise TypeError(
                f"batch_shuffler is {shuffler!r}; expected a BatchShuffler, as MyShuffler() or "
                'BatchShufflerFactory.create("my_model") makes one'
            )
        check_reduction(loss_reduction)
        if loss_reduction == "global_mean" and (shuffler.window > 1 or shuffler.in_micro_batches):
            raise ValueError(
                'loss_reduction="global_mean" is of a whole step: with micro-batches or a window return the '
                'mean over the loss tokens that the model was given, and use "mean"'
            )
        self._reduction = str(loss_reduction)
        self._shuffler = shuffler
        shuffler.expects_scale = False
        self._rank, self._num_ranks = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        covers_all_ranks = shuffler.group.num_ranks == self._num_ranks
        self._all_ranks = None if covers_all_ranks else AllRanks(shuffler.window)
        self._ahead: PlanAhead[_Step] = PlanAhead(self._plan, shuffler.window, self._prepare, device)
        self._planned: deque[_Step] = deque()
        self._exchanged: deque[_Step] = deque()
        self._computed: _Step | None = None
        self._clock = ComputeClock(device)

    def next_batch(self, loader: Iterator[Any]) -> Any | None:
        """This rank's batch of the next step, to be copied to the device; None once all loaders have ended.

        A rank whose loader has ended, or that brings nothing to the step, gets the shuffler's
        `padding_batch`.
        """
        planned = self._ahead.next_step(loader)
        if planned is None:
            self._shuffler.release()
            return None
        step, seconds = planned
        batch = step.batch
        step = replace(step, batch=None, report=replace(step.report, plan_wait_seconds=seconds))
        self._planned.append(step)
        return batch

    def exchange(self, batch: Any) -> Any:
        """Carries out the oldest plan on its device batch; collective over the ranks to balance among."""
        step = self._planned.popleft()
        with named_range("## exchange ##"):
            start = time.perf_counter()
            batch = self._shuffler.exchange(batch, step.plan)
            seconds = time.perf_counter() - start
        self._exchanged.append(replace(step, report=replace(step.report, exchange_seconds=seconds)))
        return batch

    def forward(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, StepOutput]:
        """Runs the model on the oldest exchanged batch.

        Returns:
            The loss to run backward on, and what the step returns. Data-parallel training averages gradients
            over ranks; the loss is scaled so that this average is the gradient of the mean over all loss
            tokens of the step (in a window, of its mean step), whichever rank they are on. Without any loss
            token it is 0. In micro-batches the output is a list with that of each, and of the backward only
            the tables' is left to do.
        """
        step = self._exchanged[0]
        plan = step.plan
        rank = self._shuffler.group.rank
        scale = self._num_ranks / step.mean_loss_tokens if step.mean_loss_tokens else 0.0
        if model.training:
            self._clock.start(model)
        else:
            self._clock.forget()
        if plan.micro_batches:
            loss, total, output = run_micro_batches(
                model, batch, self._shuffler, plan, self._reduction, scale
            )
        else:
            losses, output = losses_and_output(model(batch))
            mean_tokens = step.loss_tokens / self._num_ranks
            total = loss_sum(losses, self._reduction, plan.loss_tokens_on(rank), mean_tokens)
            loss, total = total * scale, total.detach()
        self._exchanged.popleft()  # not before: a step that raises may be tried again
        self._computed = step
        return loss, (total, step.loss_tokens, output)

    def reset(self) -> None:
        """Forgets the steps on their way, as a pipeline does that drops its batches; all ranks have to."""
        self._ahead.drop()
        self._shuffler.release()
        self._planned.clear()
        self._exchanged.clear()

    @property
    def report(self) -> BalanceReport:
        """Of the step that ran last.

        Where the shuffler does not balance among all ranks, loads, tokens and bound are of all ranks, what
        was moved, and the loads of micro-batches, are of the ranks that this one balances with.

        Raises:
            RuntimeError: no step has run.
        """
        return self._last_step().report

    @property
    def compute_span(self) -> ComputeSpan | None:
        """Of the step that ran last, once its backward has run; None if it did not train."""
        return self._clock.span()

    @property
    def computed_tokens(self) -> np.ndarray:
        """int64 `[samples]`, of those that this rank computed in the step that ran last."""
        plan = self._last_step().plan
        return plan.tokens[plan.partition[self._shuffler.group.rank]]

    @property
    def plan(self) -> ShufflePlan:
        """Of the step that ran last; RuntimeError if none has."""
        return self._last_step().plan

    @property
    def window_plan(self) -> WindowPlan:
        """Of the window that the step that ran last is part of; RuntimeError if none has."""
        return self._last_step().window

    def _last_step(self) -> _Step:
        if self._computed is None:
            raise RuntimeError("there is no plan and no report before the first step")
        return self._computed

    def _prepare(self, batch: Any) -> tuple[Any, Any]:
        """A batch on the host to plan with, and what to hand on: the same, unless it came on the device."""
        host = self._shuffler.sample_rows.to_host(batch)
        if host is not batch and self._rank == 0:
            _warn_of_device_batches()
        return host, batch

    def _plan(self, loaded: Sequence[tuple[Any, Any]], failure: Exception | None) -> list[_Step]:
        """Plans a window; in the planning thread."""
        self._shuffler.reserve()
        on_host = [host for host, _ in loaded]
        if self._all_ranks is None:
            window = self._shuffler.plan_window(on_host, failure)
            totals = None
        else:
            window, totals = self._all_ranks.plan(self._shuffler, on_host, failure)
        if totals is None:
            num_steps, mean, padding = len(window.steps), window.mean_loss_tokens, None
        else:
            num_steps, mean, padding = totals.num_steps, totals.mean_loss_tokens, totals.padding_batch
        steps = []
        for number in range(num_steps):
            if number < len(window.steps):
                plan = window.steps[number]
                batch = self._shuffler.rows_for_step(on_host, window, number)
                as_loaded = [given for host, given in loaded if host is batch]
                batch = as_loaded[0] if as_loaded else batch  # what came on the device stays there
            else:  # ranks that this one does not balance with have more batches
                plan, batch = self._shuffler.empty_plan(), padding
            if totals is not None:
                plan = plan.with_micro_batches_of_none(totals.num_micro_batches(number))
            if self._reduction == "global_mean":
                num_placed = plan.num_placed if totals is None else totals.num_placed(number)
                check_global_mean(num_placed, knows_padding(batch))
            traffic = self._shuffler.traffic(plan)
            report = BalanceReport.of(plan, self._shuffler.equal_rows, traffic, window, number)
            loss_tokens = plan.num_loss_tokens
            if totals is not None:
                report, loss_tokens = totals.complete(report, number), totals.loss_tokens(number)
            steps.append(_Step(batch, plan, window, loss_tokens, mean, report))
        return steps


@functools.cache
def _warn_of_device_batches() -> None:
    """Once, whatever the number of stages."""
    logger.warning(
        "the loader gives batches on the device: each is copied back to plan with, which waits for the "
        "device. Give batches on the host, pinned, for planning to cost the step nothing"
    )
