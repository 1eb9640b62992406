"""Times what each of 8 ranks would compute, one after the other on this machine, under several placements."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.demo.models import parse_config
from commons.gin_values import from_gin
from commons.partition import karmarkar_karp, refined
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, rank_process, shard_model

RANKS, STEPS = 8, 5

# Workloads of a global batch, in the order of loading, to the samples of each rank.
PLACEMENTS: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    "as loaded": lambda workloads: np.split(np.arange(len(workloads)), RANKS),
    "Karmarkar–Karp": lambda workloads: karmarkar_karp(workloads, RANKS),
    "refined": lambda workloads: refined(workloads, RANKS),
}


def replay(name: str) -> dict[str, list[list[float]]]:
    """Seconds of one forward and backward of each batch, by arm, `[step][rank]`."""
    make_task = parse_config(name)
    with rank_process() as device:
        args = from_gin(TrainerArgs)
        rows_per_rank = args.train_batch_size
        args.train_batch_size *= RANKS  # one process loads for all the ranks that it replays
        task = make_task(args, device)
        batches = _placed_batches(task, rows_per_rank)
        model, _ = shard_model(task.model, from_gin(OptimizerArgs), device)
        model.train()
        _seconds(model, batches[0][1].to(device))  # warms up
        seconds: dict[str, list[float]] = {arm: [] for arm in PLACEMENTS}
        for arm, batch in tqdm(batches, desc=f"replay {RANKS} ranks", unit="batch"):
            seconds[arm].append(_seconds(model, batch.to(device)))
    return {arm: np.reshape(of_arm, (STEPS, RANKS)).tolist() for arm, of_arm in seconds.items()}


def _placed_batches(task: TrainingTask, rows_per_rank: int) -> list[tuple[str, BaseBatch]]:
    """The arm, and one rank's batch under it, step by step and rank by rank."""
    placed = []
    global_batches = iter(task.train_dataset)
    for _ in range(STEPS):
        batch = next(global_batches)
        workloads = task.flops(batch).numpy()
        for arm, place in PLACEMENTS.items():
            parts = place(workloads)
            if any(len(part) != rows_per_rank for part in parts):
                raise RuntimeError(f"{arm} gave parts of {[len(part) for part in parts]} rows")
            placed += [(arm, batch.index_select(part)) for part in parts]
    return placed


def _seconds(model: torch.nn.Module, batch: BaseBatch) -> float:
    model.zero_grad()
    _wait_for_gpu()
    start = time.perf_counter()
    loss, _ = model(batch)
    loss.backward()
    _wait_for_gpu()
    return time.perf_counter() - start


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
