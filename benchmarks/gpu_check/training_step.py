"""Training steps of the demo's HSTU model on one GPU, run by the training pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from benchmarks.demo.training import parse_config
from benchmarks.gpu_check.rows import DELAY_CYCLES
from commons.datasets.gin_values import from_gin
from commons.training import OptimizerArgs, TrainerArgs, rank_process, shard_model
from commons.training.training_state import Progress, training_batches

STEPS = 3
TOLERANCE = 1e-5  # relative; a GPU sums gradients in varying order

# Runs a training step and returns its loss, which stays on the device.
Step = Callable[[], torch.Tensor]


def check_streams(device: torch.device) -> str:
    """Compares the losses of steps with and without a delay on the copy and exchange stream."""
    losses = []
    for cycles in (0, DELAY_CYCLES):
        with _training(device, cycles) as step:
            losses.append(torch.stack([step() for _ in range(STEPS)]).tolist())
    plain, delayed = losses
    difference = max(abs(a - b) / abs(a) for a, b in zip(plain, delayed, strict=True))
    if not difference <= TOLERANCE:
        raise AssertionError(f"losses {delayed} with a delayed stream, {plain} without")
    return f"losses of {STEPS} steps with and without a delay differ by {difference:.0e}"


@contextmanager
def _training(device: torch.device, delay_cycles: int = 0) -> Iterator[Step]:
    """Sets up training in this process. Yields the step, which first delays the copy and exchange stream."""
    try:
        with rank_process():
            make_task = parse_config("hstu")
            args = from_gin(TrainerArgs)
            args.enable_balanced_shuffler = True
            task = make_task(args, device)
            model, optimizer = shard_model(task.model, from_gin(OptimizerArgs), device)
            pipeline = task.make_pipeline(args, model, optimizer, device)
            batches = training_batches(task, device, Progress())

            def step() -> torch.Tensor:
                if delay_cycles and device.type == "cuda":
                    with torch.cuda.stream(pipeline._memcpy_stream):
                        torch.cuda._sleep(delay_cycles)
                pipeline.progress(batches)
                return pipeline.loss_sum

            yield step
    finally:
        if dist.is_initialized():  # left over after a failure
            dist.destroy_process_group()
