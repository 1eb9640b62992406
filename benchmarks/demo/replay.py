"""Times what each of 8 ranks would compute, one after the other on this machine, under several placements."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import gin
import numpy as np
import torch
from tqdm import tqdm

from benchmarks.demo.training import CONFIG
from commons.datasets import HSTUBatch
from commons.gin_values import from_gin
from commons.partition import karmarkar_karp
from commons.training import TrainerArgs, rank_process
from hstu.training.ranking_task import ranking_task

RANKS, STEPS, REPEATS = 8, 5, 1

# Workloads of a global batch, in the order of loading, to the samples of each rank.
PLACEMENTS: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    "as loaded": lambda workloads: np.split(np.arange(len(workloads)), RANKS),
    "Karmarkar–Karp": lambda workloads: karmarkar_karp(workloads, RANKS),
}


def replay() -> dict[str, list[list[float]]]:
    """Median seconds of forward and backward, by arm, `[step][rank]`.

    The repeats go over all batches in turn, so that a disturbance of the machine meets all arms alike.
    """
    gin.parse_config_file(str(CONFIG))
    with rank_process() as device:
        args = from_gin(TrainerArgs)
        rows_per_rank = args.train_batch_size
        args.train_batch_size *= RANKS  # one process loads for all the ranks that it replays
        task = ranking_task(args, device)
        batches = _placed_batches(task, rows_per_rank)
        task.model.train()
        _seconds(task.model, batches[0][2])  # warms up
        seconds: dict[tuple[str, int, int], list[float]] = {}
        runs = [(key, batch) for _ in range(REPEATS) for *key, batch in batches]
        for key, batch in tqdm(runs, desc="replay 8 ranks", unit="batch"):
            seconds.setdefault(tuple(key), []).append(_seconds(task.model, batch))
    return {
        arm: [
            [statistics.median(seconds[arm, step * RANKS + rank]) for rank in range(RANKS)]
            for step in range(STEPS)
        ]
        for arm in PLACEMENTS
    }


def _placed_batches(task: Any, rows_per_rank: int) -> list[tuple[str, int, HSTUBatch]]:
    """Arm, step × ranks + rank, and that rank's batch."""
    placed = []
    global_batches = iter(task.train_dataset)
    for step in range(STEPS):
        batch = next(global_batches)
        workloads = task.flops(batch).numpy()
        for arm, place in PLACEMENTS.items():
            parts = place(workloads)
            if any(len(part) != rows_per_rank for part in parts):
                raise RuntimeError(f"{arm} gave parts of {[len(part) for part in parts]} rows")
            placed += [
                (arm, step * RANKS + rank, batch.index_select(part)) for rank, part in enumerate(parts)
            ]
    return placed


def _seconds(model: torch.nn.Module, batch: HSTUBatch) -> float:
    model.zero_grad()
    start = time.perf_counter()
    loss, _ = model(batch)
    loss.backward()
    return time.perf_counter() - start
