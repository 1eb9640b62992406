"""What the shuffle stage costs: its share of a training step, on the demo's model and two ranks.

Times, on the main thread, planning (gather and partition) and exchange of every step. Before each, the ranks
wait for each other at a barrier, so that the stage is not charged with waiting for a slower rank's compute;
what the barrier takes is reported as skew.

    python -m benchmarks.shuffle_stage
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.demo.models import parse_config
from benchmarks.machine import machine, spread
from benchmarks.torchrun import torchrun
from commons.distributed import BatchShuffler
from commons.gin_values import from_gin
from commons.pipeline import TrainPipelineFactory
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, rank_process, run_rank, shard_model

RESULT = Path(__file__).parent / "results" / "shuffle_stage.json"
RANKS = 2
WARM_UP_STEPS, STEPS = 3, 40


class StageClock:
    """Times the calls that a pipeline makes of a shuffler."""

    def __init__(self, shuffler: BatchShuffler) -> None:
        self.milliseconds: dict[str, list[float]] = {"skew": [], "plan": [], "exchange": []}
        shuffler.plan = self._timed("plan", shuffler.plan)  # type: ignore[method-assign]
        shuffler.exchange = self._timed("exchange", shuffler.exchange)  # type: ignore[method-assign]

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            times = [time.perf_counter()]
            dist.barrier()
            times.append(time.perf_counter())
            result = method(*args)
            times.append(time.perf_counter())
            self.milliseconds["skew"].append((times[1] - times[0]) * 1e3)
            self.milliseconds[name].append((times[2] - times[1]) * 1e3)
            return result

        return call


def main() -> None:
    """Starts the ranks, or, in a rank, runs the benchmark; rank 0 prints and writes the figures."""
    if "RANK" not in os.environ:
        torchrun(RANKS, "benchmarks.shuffle_stage")
        return
    make_task = parse_config("hstu")
    with rank_process() as device:
        figures = _measure(make_task, device)
        if dist.get_rank() == 0:
            print(json.dumps(figures, indent=1))
            RESULT.write_text(json.dumps(figures, indent=1) + "\n")


def _measure(make_task: Callable[..., TrainingTask], device: torch.device) -> dict[str, Any]:
    args = from_gin(TrainerArgs)
    task = make_task(args, device)
    shuffler = task.make_shuffler(replace(args, enable_balanced_shuffler=True))
    clock = StageClock(shuffler)
    model, optimizer = shard_model(task.model, from_gin(OptimizerArgs), device)
    pipeline = TrainPipelineFactory.create(
        args.pipeline_type, model=model, optimizer=optimizer, device=device, batch_shuffler=shuffler
    )
    batches = iter(task.train_dataset)
    step_milliseconds, moved = [], []
    for step in range(WARM_UP_STEPS + STEPS):
        if step == WARM_UP_STEPS:
            for milliseconds in clock.milliseconds.values():
                milliseconds.clear()
        start = time.perf_counter()
        pipeline.progress(batches)
        if step >= WARM_UP_STEPS:
            step_milliseconds.append((time.perf_counter() - start) * 1e3)
            moved.append(pipeline.report.bytes_moved)
    stage = [a + b for a, b in zip(clock.milliseconds["plan"], clock.milliseconds["exchange"], strict=True)]
    shares = [ms / of_step for ms, of_step in zip(stage, step_milliseconds, strict=True)]
    return {
        "ranks": RANKS,
        "rows_per_rank": args.train_batch_size,
        "partitioner": args.balance_partitioner,
        "exchange": "all_gather",
        "steps": STEPS,
        "step_ms": spread(step_milliseconds),
        "plan_ms": spread(clock.milliseconds["plan"]),
        "exchange_ms": spread(clock.milliseconds["exchange"]),
        "skew_ms": spread(clock.milliseconds["skew"]),
        "stage_share_of_step": spread(shares, 5),
        "kilobytes_moved_per_step": spread([count / 1e3 for count in moved]),
        "machine": machine(),
    }


if __name__ == "__main__":
    run_rank(main)
