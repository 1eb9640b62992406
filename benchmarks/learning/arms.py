"""A training with one setting of `balance_cost`, measured step by step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from commons.gin_values import from_gin
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, shard_model

BALANCED = {"enable_balanced_shuffler": True, "balance_equal_rows": False}


class Arm:
    """A model of its own, trained on the same batches as that of any other arm.

    Args:
        make_task: makes the model, and its data.
        settings: what differs from the gin file.
        device: of this rank.
        with_part: adds a part to the model.
        repeats: whether every step has the batch of the first.

    Attributes:
        step_seconds: of the blocks' mean step, for each step.
        compute_seconds: of this rank.
        predicted_seconds: of each rank, None before anything was learned.
        loads: `[ranks]`, workloads that ranks computed.
        speeds: of the ranks, as planning took them.
    """

    def __init__(
        self,
        make_task: Callable[..., TrainingTask],
        settings: dict[str, Any],
        device: torch.device,
        with_part: Callable[[nn.Module], nn.Module] = lambda model: model,
        repeats: bool = False,
    ) -> None:
        args = replace(from_gin(TrainerArgs), pipeline_type="none", **settings)
        task = make_task(args, device)
        task = replace(task, model=with_part(task.model))
        model, optimizer = shard_model(task.model, from_gin(OptimizerArgs), device)
        self._pipeline = task.make_pipeline(args, model, optimizer, device)
        self._pipeline.time_steps()
        self._batches = _stream(task, repeats)
        self.step_seconds: list[float] = []
        self.compute_seconds: list[float] = []
        self.predicted_seconds: list[list[float] | None] = []
        self.loads: list[list[float]] = []
        self.speeds: list[list[float]] = []

    def run(self, steps: int) -> None:
        """Trains some steps; timed from when all ranks are ready to when all are done."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self._pipeline.progress(self._batches)
            self.compute_seconds.append(self._pipeline.compute_span.seconds())
            plan = self._pipeline.plan
            predicted = plan.predicted_seconds
            self.predicted_seconds.append(None if predicted is None else predicted.tolist())
            self.loads.append(plan.loads.tolist())
            self.speeds.append(self._pipeline.report.rank_speeds.round(4).tolist())
        dist.barrier()
        self.step_seconds += [(time.perf_counter() - start) / steps] * steps

    def measured(self, warm_up_steps: int) -> dict[str, Any]:
        """Returns what was measured after the first steps; collective."""
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, self.compute_seconds)
        after = slice(warm_up_steps, None)
        return {
            "step_seconds": np.round(self.step_seconds[after], 5).tolist(),
            "compute_seconds": np.transpose(everyones).round(5)[after].tolist(),
            "predicted_seconds": self.predicted_seconds[after],
            "loads": self.loads[after],
            "speeds": self.speeds[after],
        }


def _stream(task: TrainingTask, repeats: bool) -> Iterator[Any]:
    for epoch in itertools.count():
        task.train_dataset.set_epoch(epoch, 0)
        for batch in task.train_dataset:
            yield from itertools.repeat(batch) if repeats else [batch]
