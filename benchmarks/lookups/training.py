"""Training steps with lookups on the ranks of torchrun: all arms alternating, on the same batches.

torchrun --nproc_per_node 2 -m benchmarks.lookups.training OUTPUT.json
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.lookups.arms import ARMS, REFERENCE, shuffler_of
from benchmarks.lookups.model import FLOPS, ROW_WIDTH, ranking_model
from benchmarks.lookups.streams import LENGTHS, NUM_ITEMS, NUM_USERS, STREAMS, batches
from benchmarks.lookups.unique_lookups import UniqueLookups
from benchmarks.machine import spread
from commons.datasets import HSTUBatch
from commons.pipeline import TrainPipelineFactory
from commons.training import OptimizerArgs, rank_process, run_rank, shard_model

WARM_UP_STEPS, BLOCKS, STEPS_PER_BLOCK = 2, 20, 2
STEPS = WARM_UP_STEPS + BLOCKS * STEPS_PER_BLOCK
ROWS_OF_TABLES = {"item": NUM_ITEMS, "user_id": NUM_USERS}  # the sharded ones, by feature


class Arm:
    """Trains the model, which all arms share, with the shuffler of one."""

    def __init__(
        self, name: str, model: nn.Module, lookups: UniqueLookups, optimizer: Any, loaded: list[HSTUBatch]
    ) -> None:
        self._lookups, self._loaded = lookups, loaded
        self._shuffler = shuffler_of(name, FLOPS)
        self._pipeline = TrainPipelineFactory.create(
            "none",
            model=model,
            optimizer=optimizer,
            device=torch.device("cpu"),
            batch_shuffler=self._shuffler,
            loss_reduction="sum",
        )
        self._batches = iter(loaded)
        self.step_milliseconds: list[float] = []
        self._counts: list[list[float]] = []  # of each step: unique ids, those of other ranks, bytes sent
        self._imbalance: list[float] = []

    def run(self, steps: int) -> None:
        """Trains some steps."""
        dist.barrier()
        for _ in range(steps):
            start = time.perf_counter()
            self._pipeline.progress(self._batches)
            self.step_milliseconds.append((time.perf_counter() - start) * 1e3)
            report = self._pipeline.report
            self._imbalance.append(report.imbalance_after)
            self._counts.append([*_looked_up(self._lookups), report.bytes_sent])

    def clear(self) -> None:
        """Forgets what was measured so far."""
        for measured in (self.step_milliseconds, self._counts, self._imbalance):
            measured.clear()

    def figures(self) -> dict[str, Any]:
        """Returns times of this rank, and counts of all ranks. Collective; the arm cannot run again."""
        self._pipeline.reset()
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, self._counts)
        unique, remote, sent = np.moveaxis(np.array(everyones, dtype=np.float64), 2, 0)  # [ranks, steps] each
        row_bytes = ROW_WIDTH * torch.float32.itemsize
        return {
            "step_ms": spread(self.step_milliseconds),
            "planning_ms": spread(self._planning_milliseconds()),
            "imbalance": round(float(np.mean(self._imbalance)), 4),
            "unique_ids": round(float(unique.mean()), 1),
            "unique_ids_of_most": round(float(unique.max(0).mean()), 1),
            # Forward brings the rows that other ranks hold, and backward returns a gradient for each.
            "embedding_megabytes": round(2 * row_bytes * float(remote.mean()) / 1e6, 3),
            "sample_kilobytes_sent": round(float(sent.mean()) / 1e3, 2),
        }

    def _planning_milliseconds(self) -> list[float]:
        """Plans all batches again, one by one; the gather is included."""
        milliseconds = []
        for batch in self._loaded:
            dist.barrier()
            start = time.perf_counter()
            self._shuffler.plan(batch)
            milliseconds.append((time.perf_counter() - start) * 1e3)
        return milliseconds


def _ids_per_rank(loaded: list[HSTUBatch]) -> float:
    """Returns the ids of a step that a rank has to look up, of the mean step and rank. Collective."""
    num_ids = [sum(len(batch.features[name].values()) for name in ROWS_OF_TABLES) for batch in loaded]
    of_ranks = torch.tensor(float(np.mean(num_ids)))
    dist.all_reduce(of_ranks)
    return round(float(of_ranks) / dist.get_world_size(), 1)


def _looked_up(lookups: UniqueLookups) -> tuple[int, int]:
    """Returns the unique ids of this rank's last step, and how many of their rows another rank holds."""
    unique = remote = 0
    for name, num_rows in ROWS_OF_TABLES.items():
        ids, rows_per_rank = lookups.unique_ids[name], -(-num_rows // dist.get_world_size())
        unique += len(ids)
        remote += int((ids // rows_per_rank != dist.get_rank()).sum())
    return unique, remote


def _lookup_milliseconds(lookups: UniqueLookups, loaded: list[HSTUBatch]) -> list[float]:
    """Times the lookups of each batch alone, with their backward."""
    milliseconds = []
    for batch in loaded:
        dist.barrier()
        start = time.perf_counter()
        embedded = lookups(batch.features)
        sum(of_feature.values().sum() for of_feature in embedded.values()).backward()
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return milliseconds


def _stream_figures(
    stream: str, lengths: str, model: nn.Module, lookups: UniqueLookups, optimizer: Any
) -> dict[str, Any]:
    loaded = batches(STREAMS[stream], lengths, STEPS, dist.get_rank(), dist.get_world_size())
    arms = {name: Arm(name, model, lookups, optimizer, loaded) for name in ARMS}
    for arm in arms.values():
        arm.run(WARM_UP_STEPS)
        arm.clear()
    in_turn = list(arms.values())
    lookups_ms: list[float] = []
    measured = loaded[WARM_UP_STEPS:]
    for first in range(0, len(measured), STEPS_PER_BLOCK):
        for arm in in_turn:
            arm.run(STEPS_PER_BLOCK)
        in_turn.append(in_turn.pop(0))
        lookups_ms += _lookup_milliseconds(lookups, measured[first : first + STEPS_PER_BLOCK])
    milliseconds = {
        name: np.array(arm.step_milliseconds).reshape(BLOCKS, STEPS_PER_BLOCK).sum(1)
        for name, arm in arms.items()
    }
    figures = {
        name: arm.figures() | {"ratio_to_reference": _quartiles(milliseconds[name] / milliseconds[REFERENCE])}
        for name, arm in arms.items()
    }
    return {
        "stream": stream,
        "lengths": lengths,
        "ids": _ids_per_rank(measured),
        "lookups_ms": spread(lookups_ms),
        "arms": figures,
    }


def _quartiles(ratios: np.ndarray) -> dict[str, float]:
    lower, median, upper = np.quantile(ratios, [0.25, 0.5, 0.75]).round(4).tolist()
    return {"lower": lower, "median": median, "upper": upper}


def main() -> None:
    """Runs all streams; rank 0 writes the figures."""
    output: Path = parse_arguments(__doc__, output={"type": Path}).output
    with rank_process() as device:
        torch.manual_seed(0)
        model, lookups = ranking_model()
        sharded, optimizer = shard_model(model, OptimizerArgs("adagrad", 1e-3), device)
        cases = [(stream, lengths) for lengths in LENGTHS for stream in STREAMS]
        figures = [
            _stream_figures(*case, sharded, lookups, optimizer)
            for case in tqdm(cases, desc="streams", disable=dist.get_rank() != 0)
        ]
        if dist.get_rank() == 0:
            measured = {"ranks": dist.get_world_size(), "steps": BLOCKS * STEPS_PER_BLOCK, "streams": figures}
            output.write_text(json.dumps(measured))


if __name__ == "__main__":
    run_rank(main)
