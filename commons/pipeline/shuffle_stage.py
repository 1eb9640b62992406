"""The shuffle stage: what a balanced pipeline does to a batch between its loader and its model."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..distributed import BalanceReport, BatchShuffler, ShufflePlan
from ..distributed.key_fetch import PlacedPieces
from ..distributed.learning import Learning
from ..distributed.loaded_memory import LoadedMemory
from ..distributed.loss_reduction import check_global_mean, check_reduction, loss_sum
from ..distributed.plan_ahead import PlanAhead
from ..distributed.slow_plans import SlowPlans
from ..named_ranges import named_range
from ..sequence_batch.sample_rows import knows_padding, without_copied_row
from .compute_clock import ComputeSpan
from .micro_batch_forward import losses_and_output, run_micro_batches

logger = logging.getLogger(__name__)

# A step returns the loss sum of this rank, the loss tokens of all ranks, and the model's output.
StepOutput = tuple[torch.Tensor, int, Any]


@dataclass
class _Step:
    """A step on its way.

    Attributes:
        batch: this rank's, on the host; None once it was handed out.
        everyone: the placement of all ranks.
        plan: the same among the ranks that exchange with this one.
        posted: int64 `[all ranks]`, what ranks posted when this was planned.
        plan_wait_seconds, exchange_seconds: as in the report.
        pieces: places of the rows in their samples, where one is cut.
    """

    batch: Any
    everyone: ShufflePlan
    plan: ShufflePlan
    posted: np.ndarray
    plan_wait_seconds: float = 0.0
    exchange_seconds: float = 0.0
    pieces: PlacedPieces | None = None


class ShuffleStage:
    """Plans host batches ahead, exchanges device batches, and scales the loss, in the order of the loader.

    Collectives per step: on the main thread, that of the shuffler's exchange; in the planning thread, one
    all-gather of host numbers over all ranks.

    Args:
        shuffler: places samples on ranks; it serves this stage alone, until `reset` or the loaders' end.
        device: where batches are copied to.
        loss_reduction: one of `LOSS_REDUCTIONS`, as pipelines take it.

    Attributes:
        loss_reduction: as given.
        post: returns a number for all ranks, int64; called in the planning thread before each plan. None
            for 0.
        posted: int64 `[all ranks]`, what ranks posted with the newest plan handed out: the same on all ranks
            in the same step.

    Raises:
        TypeError: `shuffler` is not a BatchShuffler.
        ValueError: an unknown reduction, or "global_mean" with micro-batches.
    """

    def __init__(
        self, shuffler: BatchShuffler | None, device: torch.device, loss_reduction: str | None
    ) -> None:
        if not isinstance(shuffler, BatchShuffler):
            raise TypeError(
                f"batch_shuffler is {shuffler!r}; expected a BatchShuffler, as MyShuffler() or "
                'BatchShufflerFactory.create("my_model") makes one'
            )
        check_reduction(loss_reduction)
        settings = shuffler.settings
        if loss_reduction == "global_mean" and settings.max_tokens_per_micro_batch is not None:
            raise ValueError(
                'loss_reduction="global_mean" is for a whole step: with micro-batches return the mean over '
                'the loss tokens that the model was given, and use "mean"'
            )
        self.loss_reduction = str(loss_reduction)
        self._shuffler = shuffler
        shuffler.expects_scale = False
        self._rank, self._num_ranks = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        self._planner = shuffler.planner_of_all_ranks()
        self._ahead: PlanAhead[_Step] = PlanAhead(self._plan, self._prepare, device)
        self._memory = LoadedMemory(shuffler.sample_rows)
        self._slow_plans = SlowPlans(self._planner, settings, type(shuffler).__name__)
        self._planned: deque[_Step] = deque()
        self._exchanged: deque[_Step] = deque()
        self._computed: _Step | None = None
        self.post: Callable[[], int] | None = None
        self.posted = np.zeros(self._num_ranks, dtype=np.int64)

    def next_batch(self, loader: Iterator[Any]) -> Any | None:
        """Returns this rank's host batch of the next step; None once all loaders have ended.

        A rank whose loader has ended gets the shuffler's `padding_batch`.
        """
        try:
            planned = self._ahead.next_step(loader)
        except Exception:
            self._memory.forget()  # some of its batches will never be handed out
            raise
        if planned is None:
            self._memory.forget()
            self._shuffler.release()
            return None
        self._memory.handed_out()
        self._slow_plans.after(self._ahead.busy_seconds)
        step, seconds = planned
        step.plan_wait_seconds = seconds
        batch, step.batch = step.batch, None
        self.posted = step.posted
        self._planned.append(step)
        return batch

    def exchange(self, batch: Any) -> Any:
        """Carries out the oldest plan on its device batch; collective over the ranks to balance among."""
        step = self._planned.popleft()
        with named_range("## exchange ##"):
            start = time.perf_counter()
            batch = self._shuffler.exchange(batch, step.plan)
            step.exchange_seconds = time.perf_counter() - start
        if step.plan.pieces is not None:
            step.pieces = batch.pieces
        self._exchanged.append(step)
        return batch

    def forward(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, StepOutput]:
        """Runs the model on the oldest exchanged batch.

        Returns:
            The loss to run backward on, and the output of the step. Data-parallel training averages gradients
            over ranks. The loss is scaled so that this average is the gradient of the mean over all loss
            tokens of the step, whichever rank they are on. Without any loss token it is 0. In micro-batches,
            the output is a list with one for each, and only the tables' backward is left to do. Without
            samples, what has one row in the output has none.
        """
        step = self._exchanged[0]
        plan, loss_tokens = step.plan, step.everyone.num_loss_tokens
        scale = self._num_ranks / loss_tokens if loss_tokens else 0.0
        if plan.in_micro_batches:
            loss, total, output = run_micro_batches(
                model, batch, self._shuffler, plan, self.loss_reduction, scale
            )
        else:
            losses, output = losses_and_output(model(batch))
            of_rank = plan.loss_tokens_on(self._shuffler.group.rank)
            total = loss_sum(losses, self.loss_reduction, of_rank, loss_tokens / self._num_ranks)
            loss, total = total * scale, total.detach()
            is_copy = not (plan.num_placed[self._shuffler.group.rank] or knows_padding(batch))
            if is_copy and not model.training:
                output = without_copied_row(output)
        if step.pieces is not None:
            step.pieces.check_read()
        self._exchanged.popleft()  # not before: a step that raises may be tried again
        self._computed = step
        return loss, (total, loss_tokens, output)

    def reset(self) -> None:
        """Drops the steps on their way, as a pipeline does with its batches; all ranks have to."""
        self._ahead.drop()
        self._memory.forget()
        self._shuffler.release()
        self._planned.clear()
        self._exchanged.clear()

    def report(self) -> BalanceReport:
        """Computes the report of the last step, over all ranks; bytes and times are this rank's.

        Raises:
            RuntimeError: no step has run.
        """
        step = self.last_step
        return BalanceReport.of(
            step.everyone,
            self._shuffler.settings.equal_rows,
            self._shuffler.traffic(step.plan),
            step.plan_wait_seconds,
            step.exchange_seconds,
            step.pieces,
            self._shuffler.unit,
        )

    @property
    def cuts_samples(self) -> bool:
        """Whether samples may be cut into pieces, which wait for each other's keys and values."""
        return self._shuffler.settings.split

    @property
    def learning(self) -> Learning | None:
        """The learning of costs and speeds, from what `record` takes; None without `cost="learned"`."""
        return self._planner.learning

    def record(self, span: ComputeSpan | None) -> None:
        """Takes the compute time of the last step; None if it was not measured."""
        step = self.last_step
        if span is not None and self.learning is not None:
            waited = 0.0 if step.pieces is None else step.pieces.seconds
            time = span if step.pieces is None else max(span.seconds() - waited, 0.0)
            self.learning.record(step.everyone, time)

    def learning_state(self) -> dict[str, bytes]:
        """Returns what was learned, and this rank's times that no plan has used yet; empty without learning.

        A run that loads it plans the next steps as this one does.
        """
        learning = self.learning
        if learning is None:
            return {}
        last = self._computed
        return learning.saved(0 if last is None else learning.number_of(last.everyone) + 1)

    @property
    def rank(self) -> int:
        """This rank's place in the plans of `last_step`."""
        return self._shuffler.group.rank

    @property
    def last_step(self) -> _Step:
        """The step that ran last; RuntimeError if none has."""
        if self._computed is None:
            raise RuntimeError("there is no plan and no report before the first step")
        return self._computed

    def _prepare(self, batch: Any) -> tuple[Any, Any]:
        """Returns a batch on the host to plan with; and the batch to hand out, which may be on the device."""
        self._memory.loaded(batch)
        host = self._shuffler.sample_rows.to_host(batch)
        if host is not batch and self._rank == 0:
            _warn_of_device_batches()
        return host, batch

    def _plan(self, loaded: tuple[Any, Any] | None, failure: Exception | None) -> _Step | None:
        """Plans a step; in the planning thread."""
        self._shuffler.reserve()
        on_host, given = loaded or (None, None)
        everyone = self._shuffler.plan_with(self._planner, on_host, failure, self.post)
        if not everyone.has_batch:
            return None
        plan = everyone.within(np.array(self._shuffler.group.ranks))
        batch = self._shuffler.batch_for_step(on_host, plan)
        if batch is on_host:
            batch = given  # what came on the device stays there
        if self.loss_reduction == "global_mean":
            check_global_mean(everyone.num_placed, knows_padding(batch))
        return _Step(batch, everyone, plan, self._planner.posted)


@functools.cache
def _warn_of_device_batches() -> None:
    """Warns once per process, however many stages there are."""
    logger.warning(
        "the loader gives batches on the device: each is copied back to plan with, which waits for the "
        "device. Give batches on the host, pinned, for planning to cost the step nothing"
    )
