"""The stage's share of a training step: the demo's model on two ranks, all arms alternating.

torchrun --nproc_per_node 2 -m benchmarks.shuffle.training OUTPUT.json
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.demo.models import parse_config
from benchmarks.machine import spread
from benchmarks.shuffle.arms import ARMS
from benchmarks.shuffle.stage_clock import StageClock
from commons.gin_values import from_gin
from commons.pipeline import TrainPipelineFactory
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, rank_process, run_rank, shard_model

WARM_UP_STEPS, BLOCKS, STEPS_PER_BLOCK = 3, 10, 4


class TimedArm:
    """A model of its own, trained with the settings of one arm."""

    def __init__(
        self, make_task: Callable[..., TrainingTask], settings: dict[str, Any], device: torch.device
    ) -> None:
        args = from_gin(TrainerArgs)
        balanced = {f"balance_{name}": value for name, value in settings.items()}
        args = replace(args, enable_balanced_shuffler=True, **balanced)
        task = make_task(args, device)
        model, optimizer = shard_model(task.model, from_gin(OptimizerArgs), device)
        shuffler = task.make_shuffler(args)
        self._pipeline = TrainPipelineFactory.create(
            args.pipeline_type,
            model=model,
            optimizer=optimizer,
            device=device,
            batch_shuffler=shuffler,
            loss_reduction="sum",
        )
        self.clock = StageClock(self._pipeline._stage, shuffler)
        self._batches = self.clock.watch(iter(task.train_dataset))
        self.step_milliseconds: list[float] = []
        self.reports: list[Any] = []

    def run(self, steps: int) -> None:
        """Trains some steps."""
        for _ in range(steps):
            start = time.perf_counter()
            self._pipeline.progress(self._batches)
            self.step_milliseconds.append((time.perf_counter() - start) * 1e3)
            self.reports.append(self._pipeline.report)

    def clear(self) -> None:
        """Forgets what was measured so far."""
        self.clock.clear()
        self.step_milliseconds.clear()
        self.reports.clear()

    def figures(self) -> dict[str, Any]:
        """Medians and spread; shares are of the same step's time."""
        measured = self.clock.milliseconds
        return {
            "step_ms": spread(self.step_milliseconds),
            "planning_ms": spread(measured["planning"]),
            "wait_ms": spread(measured["wait"], 4),
            "exchange_ms": spread(measured["exchange"]),
            "skew_ms": spread(measured["skew"]),
            "wait_share_of_step": self._share("wait"),
            "exposed_share_of_step": self._share("exposed"),
            "kilobytes_sent": spread([report.bytes_sent / 1e3 for report in self.reports]),
            "kilobytes_received": spread([report.bytes_received / 1e3 for report in self.reports]),
            "imbalance": round(
                sum(report.loads_after.max() for report in self.reports)
                / sum(report.loads_after.mean() for report in self.reports),
                4,
            ),
        }

    def _share(self, name: str) -> dict[str, float]:
        pairs = zip(self.clock.milliseconds[name], self.step_milliseconds, strict=True)
        return spread([milliseconds / of_step for milliseconds, of_step in pairs], 5)


def main() -> None:
    """Runs all arms; rank 0 writes the figures."""
    output: Path = parse_arguments(__doc__, output={"type": Path}).output
    make_task = parse_config("hstu")
    with rank_process() as device:
        arms = {name: TimedArm(make_task, settings, device) for name, settings in ARMS.items()}
        for arm in arms.values():
            arm.run(WARM_UP_STEPS)
            arm.clear()
        in_turn = list(arms.values())
        for _ in tqdm(range(BLOCKS), desc="train", unit="block", disable=dist.get_rank() != 0):
            for arm in in_turn:
                arm.run(STEPS_PER_BLOCK)
            in_turn.append(in_turn.pop(0))
        if dist.get_rank() == 0:
            figures = {
                "ranks": dist.get_world_size(),
                "rows_per_rank": from_gin(TrainerArgs).train_batch_size,
                "steps": BLOCKS * STEPS_PER_BLOCK,
                "arms": {name: arm.figures() for name, arm in arms.items()},
            }
            output.write_text(json.dumps(figures))


if __name__ == "__main__":
    run_rank(main)
