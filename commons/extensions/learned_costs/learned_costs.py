"""Balances by costs and speeds that follow the times of the training's steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ...checks import SettingError, require_type
from ...distributed.extension import Extension, Forward, Place
from ...distributed.row_table import RowTable
from ...distributed.shuffle_plan import ShufflePlan
from ...distributed.step import Step
from ...partition.balance import relative_to_mean
from ...perf_model.compute_clock import ComputeClock
from ...perf_model.cost import Cost
from .learning import Learning

if TYPE_CHECKING:
    from ...distributed.batch_shuffler import BatchShuffler

logger = logging.getLogger(__name__)
SPEED_LIMIT = 2.0
MAX_SPEED_LIMIT = 30  # so that two ranks differ by less than MAX_SPEED_RATIO
# Ranks differ in speed if the fastest is this many times as fast as the slowest. Loads follow if the slowest
# takes at most this share longer than the mean. A warning comes after so many plans in which they do not.
_DIFFERENT_SPEEDS, _FOLLOWED, _PLANS_BEHIND = 1.25, 0.05, 20


class LearnedCosts(Extension):
    """Balances by what samples cost and how fast ranks are, as the steps of the training show.

    Pipelines measure these; a loop of your own calls `record`.

    Args:
        speed_limit: a rank's speed is taken to be at most this times, and at least 1 / this times, the median
            rank's: its rows and memory follow it. 1.0 for equal speeds.

    Raises:
        TypeError: `speed_limit` is no number.
        ValueError: it is not within 1 to 30. When a shuffler is made: it has a cost of its own, or moves no
            sample. When a pipeline is made: its steps wait for other ranks in a way that cannot be told from
            computation.
    """

    name = "learned_costs"
    moves = True
    order = 10

    def __init__(self, speed_limit: float = SPEED_LIMIT) -> None:
        require_type("LearnedCosts.speed_limit", speed_limit, float)
        if not 1 <= speed_limit <= MAX_SPEED_LIMIT:
            raise SettingError(
                f"{{speed_limit}}: expected 1 to {MAX_SPEED_LIMIT}, times as fast as the median rank",
                speed_limit=speed_limit,
            )
        self.speed_limit = speed_limit
        self._restored: dict[str, bytes] = {}  # until the first plan
        self._last: ShufflePlan | None = None
        self._plans_behind = 0

    def settings(self) -> Mapping[str, Any]:
        """Returns the speed limit."""
        return {"speed_limit": self.speed_limit}

    def setup(self, shuffler: BatchShuffler) -> None:
        """Starts to learn anew, for the ranks that plan together."""
        if shuffler.cost is not None:
            raise ValueError(f"cost={shuffler.cost} has no effect with LearnedCosts: leave out one of them")
        self._shuffler, ranks = shuffler, shuffler.group
        self._learning = Learning(ranks.num_ranks, ranks.rank, self.speed_limit, ranks.hosts, ranks.ranks)
        if self._restored:
            self._learning.restore(self._restored)

    @property
    def num_ranks(self) -> int:
        """Ranks that learn together."""
        return self._shuffler.group.num_ranks

    @property
    def num_posted(self) -> int:
        """Numbers that the gather carries for each rank."""
        return self._learning.num_posted

    def post(self) -> np.ndarray:
        """Returns this rank's speed, a time, and rank 0's coefficients."""
        return self._learning.to_post()

    def place(self, rows: RowTable, place: Place) -> ShufflePlan:
        """Places rows by the learned cost and speeds, once it has learned from what ranks posted."""
        learning, self._restored = self._learning, {}
        learning.take(rows.posts[self.name], rows.work.shape[1])
        state = learning.state
        rows = replace(rows, speeds=learning.speeds())
        plan = place(rows if state.cost is None else rows.with_cost(state.cost))
        if state.cost is not None:
            plan = plan.with_seconds(state.cost, state.speeds)
        learning.planned(plan)
        self._warn_of_unfollowed_speeds(plan)
        return plan

    def join(self, model: torch.nn.Module, device: torch.device, loss_reduction: str) -> None:
        """Measures the steps of a pipeline, by hooks that stay on the model."""
        check_waits(model, device, self._shuffler, loss_reduction)
        self._model = model
        group = self._shuffler.group  # alone: the clock outlives no model that its shuffler holds
        self._clock = ComputeClock.of(model, device, lambda: group.wait_seconds)

    def forward(self, step: Step, forward: Forward) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Measures the step, which ends with its backward."""
        span = self._clock.begin()
        result = forward(step)
        if step.plan.has_batch:  # else its ranks have nothing to time, and others of the job still train
            if self._model.training and torch.is_grad_enabled():
                self._learning.record(step.plan, span)
            self._last = step.plan
        return result

    def record(self, plan: ShufflePlan, seconds: float) -> None:
        """Takes the time that this rank computed a step, in a loop of your own.

        The planning gather of a later step, the same on all ranks, carries it: no collective, and no
        host-device synchronization. A step that some rank does not record does not count. Record no step
        whose time says nothing of its samples, for example the first, which compiles.

        Args:
            plan: plan of the step, among the last that were planned.
            seconds: time of forward and backward, or of the forward alone, without waits for other ranks; on
                CUDA, by events.

        Raises:
            ValueError: the plan is not among the last; the step was recorded before; or the time is not a
                finite number above 0.
        """
        if not 0 < seconds < float("inf"):
            raise ValueError(f"record got {seconds} seconds; expected a finite number above 0")
        self._learning.record(plan, float(seconds))

    def cost(self) -> Cost | None:
        """Returns what was learned, to save and to balance by; None before anything was."""
        return self._learning.learned_cost()

    def state(self, last: ShufflePlan | None = None) -> dict[str, bytes]:
        """Returns what was learned, and this rank's times that no plan has used yet, for a checkpoint.

        Args:
            last: plan of the last step before the checkpoint; None for the last that a pipeline has run, or
                before the first step.
        """
        last = last or self._last
        return self._learning.saved(0 if last is None else self._learning.number_of(last) + 1)

    def load_state(self, state: dict[str, bytes]) -> None:
        """Restores `state`, before the first plan: further plans are those of the run that saved it.

        On other hosts, or another number of ranks, speeds are learned anew.

        Args:
            state: data that this rank saved, or without "times" what another rank saved.

        Raises:
            ValueError: `state` has no "learned".
            RuntimeError: plans were made before.
        """
        if state:
            self._learning.restore(state)
            self._restored = dict(state)

    def _warn_of_unfollowed_speeds(self, plan: ShufflePlan) -> None:
        """Warns once where ranks differ in speed, and loads have long not followed."""
        speeds, loads = plan.rows.speeds, plan.loads
        if speeds is None or self._shuffler.group.rank != 0 or self._plans_behind == _PLANS_BEHIND:
            return
        ratio = float(speeds.max() / speeds.min())
        follows = ratio <= _DIFFERENT_SPEEDS or relative_to_mean(loads, speeds) <= 1 + _FOLLOWED
        self._plans_behind = 0 if follows else self._plans_behind + 1
        if self._plans_behind == _PLANS_BEHIND:
            logger.warning(
                f"ranks differ in speed by {ratio:.2f} times, and loads do not follow: equal_rows=True, a "
                "high tolerance, a tight max_tokens, a partitioner that hardly heeds speeds, such as "
                '"karmarkar_karp", or samples too heavy for a slow rank keep them from it'
            )


def check_waits(
    model: torch.nn.Module, device: torch.device, shuffler: BatchShuffler, loss_reduction: str
) -> None:
    """Checks that spans hold no waits for other ranks, which would pass for computation.

    Raises:
        ValueError: they do, and cannot be subtracted.
    """
    reason = None
    for extension in shuffler.extensions:
        if extension.waits_on_device and device.type == "cuda":
            reason = extension.waits_on_device
    if loss_reduction == "global_mean":
        reason = 'loss_reduction="global_mean" means that the model waits for the other ranks\' counts'
    for module in model.modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            reason = "SyncBatchNorm waits for all ranks within a step"
        elif isinstance(module, FullyShardedDataParallel | FSDPModule):
            reason = "a fully sharded module waits for its parameters within a step"
        elif isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers():
            reason = (
                "DistributedDataParallel waits for rank 0's buffers at the start of a step, unless "
                "broadcast_buffers=False"
            )
    if reason is not None:
        raise ValueError(
            f"LearnedCosts: {reason}, and that cannot be told from computation; use workloads, or the cost "
            "that a calibration measured"
        )
