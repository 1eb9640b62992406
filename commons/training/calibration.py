"""Calibration: measures the cost of samples by training a model for a while and timing its steps."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from ..distributed.ranks import RankGroup
from ..perf_model.calibrate import WARM_UP_STEPS, MeasuredSteps
from ..perf_model.compute_clock import ComputeClock
from .sharded_model import shard_model
from .training_args import OptimizerArgs, TrainerArgs
from .training_state import Progress, training_batches
from .training_task import TrainingTask

# Fewer steps would not suffice to fit the cost, however long they take.
LEAST_STEPS = 20


def measure_steps(
    task: TrainingTask,
    args: TrainerArgs,
    optimizer_args: OptimizerArgs,
    device: torch.device,
    seconds: float,
) -> MeasuredSteps:
    """Trains on unbalanced batches, whose loads differ most, and returns the timed steps of all ranks.

    Runs for `seconds`, or longer to time `LEAST_STEPS` steps. Saves nothing that it trains. On CUDA, each
    step waits for the device. The "native" pipeline replaces "prefetch" and "semi_sync". Collective.

    Raises:
        ValueError: the training or evaluation set is empty, or one rank loads for all.
    """
    if args.single_rank_load:
        raise ValueError(
            "TrainerArgs.single_rank_load = True: expected False where each rank's load is measured"
        )
    task.check_datasets()
    name = "native" if args.pipeline_type in ("prefetch", "semi_sync") else args.pipeline_type
    if args.batch_shuffler not in ("", task.shuffler_name):  # a user's shuffler, which has its own columns
        shuffler = task.make_shuffler(replace(args, enable_balanced_shuffler=True))
        task = replace(task, flops=shuffler.get_workloads, get_tokens=shuffler.get_tokens)
    args = replace(args, enable_balanced_shuffler=False, pipeline_type=name)
    model, optimizer = shard_model(task.model, optimizer_args, device)
    pipeline = task.make_pipeline(args, model, optimizer, device)
    clock = ComputeClock(model, device)
    batches = training_batches(task, device, Progress())
    channel = RankGroup.of().channel()
    rows: list[tuple[float, ...]] = []
    num_steps = 0
    model.train()
    start = time.perf_counter()
    hidden = True if dist.get_rank() else None  # None hides the bar without a terminal
    with tqdm(total=round(seconds), unit="s", desc="calibrate", disable=hidden) as bar:
        while True:
            # All ranks use rank 0's clock, so that they stop after the same step.
            passed = float(channel.all_gather(np.array([time.perf_counter() - start]))[0, 0])
            bar.update(min(round(passed), round(seconds)) - bar.n)
            if passed > seconds and num_steps >= WARM_UP_STEPS + LEAST_STEPS:
                break
            num_steps += 1
            span = clock.begin()
            pipeline.progress(batches)
            if seconds_of_step := span.seconds():
                rows.append((*pipeline.report.counts_after[dist.get_rank()].tolist(), seconds_of_step))
    pipeline.reset()
    rank_rows = channel.all_gather_objects(rows[WARM_UP_STEPS:])
    return MeasuredSteps.of([row for rows_of_rank in rank_rows for row in rows_of_rank])
