"""Balances by sample costs and rank speeds, learned from the measured times of training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ...checks import SettingError, require_type
from ...distributed.exchange import Step
from ...distributed.extension import Extension, Forward, Place
from ...distributed.plan import RowTable, ShufflePlan
from ...perf_model.compute_clock import ComputeClock
from ...perf_model.cost import Cost
from .learning import Learning, together

if TYPE_CHECKING:
    from ...distributed.shuffler import BatchShuffler

SPEED_LIMIT = 2.0
MAX_SPEED_LIMIT = 30  # so that two ranks differ by less than MAX_SPEED_RATIO


class LearnedCosts(Extension):
    """Balances by sample costs and rank speeds, which it learns from the times of training steps.

    Pipelines measure the steps. In a loop of your own, call `record`.

    Args:
        speed_limit: largest factor by which a rank counts as faster or slower than the median rank. Its rows
            and memory grow or shrink with its speed. 1.0 means that all ranks count as equally fast.

    Raises:
        TypeError: `speed_limit` is not a number.
        ValueError: `speed_limit` is not within 1 to 30. When a shuffler is made: the shuffler has a cost of
            its own, or moves no samples. When a pipeline is made: its steps contain waits for other ranks
            that cannot be told apart from computation.
    """

    name = "learned_costs"
    moves = computes_alone = times_steps = True
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

    def settings(self) -> Mapping[str, Any]:
        """Returns the speed limit."""
        return {"speed_limit": self.speed_limit}

    def setup(self, shuffler: BatchShuffler) -> None:
        """Starts to learn for the ranks that plan together, from restored state if there is any."""
        if shuffler.cost is not None:
            raise ValueError(f"cost={shuffler.cost} has no effect with LearnedCosts: leave out one of them")
        self._extensions, self._group = shuffler.extensions, shuffler.group
        self._learning = Learning(self._group, self.speed_limit)
        self._together = shuffler.together.channel()
        if self._restored:
            self._learning.restore(self._restored)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that learn together."""
        return self._group.num_ranks

    @property
    def num_posted(self) -> int:
        """Number of integers that each rank posts with the planning gather."""
        return self._learning.num_posted

    def post(self) -> np.ndarray:
        """Returns this rank's speed, a hash, a step time, and cost coefficients, int64 `[num_posted]`.

        Ranks that compute together post the same, so that they plan alike. Takes one more gather among them.
        """
        post, failure = np.zeros(0, dtype=np.int64), None
        try:
            post = self._learning.to_post()
        except Exception as error:  # others of the group wait for this rank
            failure = error
        return together(self._together.all_gather_objects(post, failure))

    def place(self, rows: RowTable, place: Place) -> ShufflePlan:
        """Learns from the numbers that all ranks posted, then places rows by the learned cost and speeds."""
        learning, self._restored = self._learning, {}
        state = learning.updated(rows.posts[self.name], rows.work.shape[1])
        rows = replace(rows, speeds=learning.speeds(state))
        plan = place(rows if state.cost is None else rows.with_cost(state.cost))
        if state.cost is not None:
            plan = plan.with_seconds(state.cost, state.speeds)
        learning.planned(plan, state)
        return plan

    def join(self, model: torch.nn.Module, device: torch.device, loss_reduction: str) -> None:
        """Prepares to time the steps of a pipeline, with hooks that stay on the model."""
        check_waits(model, device, self._extensions, loss_reduction)
        self._model = model
        group = self._group  # not `self`, through which the clock would keep the model alive
        self._clock = ComputeClock.of(model, device, lambda: group.wait_seconds)

    def forward(self, step: Step, forward: Forward) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Runs the model, and times the step, which ends with the backward."""
        span = self._clock.begin()
        result = forward(step)
        if step.plan.has_batch:  # otherwise only other ranks of the job still train
            if self._model.training and torch.is_grad_enabled():
                self._learning.record(step.plan, span)
            self._last = step.plan
        return result

    def record(self, plan: ShufflePlan, seconds: float) -> None:
        """Records how long this rank computed in a step of your own loop.

        The planning gather of a later step carries the time, so this call needs no collective and no
        host-device synchronization. A step counts only if every rank records it. Do not record steps whose
        times do not depend on their samples, such as the first step, which compiles.

        Args:
            plan: plan of the step, which must be among the most recent plans.
            seconds: time of forward and backward, or of the forward only, without waits for other ranks. On
                CUDA, measure it with events.

        Raises:
            ValueError: the plan is not among the most recent, the step was already recorded, or the time is
                not a finite number above 0.
        """
        if not 0 < seconds < float("inf"):
            raise ValueError(f"record got {seconds} seconds; expected a finite number above 0")
        self._learning.record(plan, float(seconds))
        self._last = plan

    def cost(self) -> Cost | None:
        """Returns the learned cost, to save or to balance by, or None before anything was learned."""
        return self._learning.learned_cost()

    def state(self, last: ShufflePlan | None = None) -> dict[str, bytes]:
        """Returns a checkpoint of the learned state, and of this rank's times that no plan has used yet.

        Args:
            last: plan of the last step before the checkpoint. None means the plan that a pipeline ran last,
                or whose time was recorded last, or that no step has run yet.
        """
        last = last or self._last
        return self._learning.saved(None if last is None else self._learning.number_of(last) + 1)

    def load_state(self, state: dict[str, bytes]) -> None:
        """Restores a `state` before the first plan, so that plans continue as in the run that saved it.

        If the ranks or their hosts have changed, or "times" is missing, speeds are learned anew.

        Args:
            state: state that this rank saved, or the state of another rank without its "times".

        Raises:
            KeyError: `state` has no "learned".
            RuntimeError: plans were already made.
        """
        if state:
            self._learning.restore(state)
            self._restored = dict(state)


def check_waits(
    model: torch.nn.Module, device: torch.device, extensions: Sequence[Extension], loss_reduction: str
) -> None:
    """Raises a ValueError if measured times contain waits for other ranks that cannot be subtracted, and so
    would count as computation."""
    waits = [extension.waits_on_device for extension in extensions if extension.waits_on_device]
    reason = waits[-1] if waits and device.type == "cuda" else None
    if loss_reduction == "global_mean":
        reason = 'loss_reduction="global_mean" means that the model waits for the other ranks\' counts'
    for module in model.modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            reason = "SyncBatchNorm waits for all ranks within a step"
        elif isinstance(module, FullyShardedDataParallel | FSDPModule):
            reason = "a fully sharded module waits for its parameters within a step"
        elif isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers():
            reason = "DistributedDataParallel waits for rank 0's buffers, unless broadcast_buffers=False"
    if reason is not None:
        raise ValueError(
            f"LearnedCosts: {reason}, and that cannot be told from computation; use workloads, or the cost "
            "that a calibration measured"
        )
