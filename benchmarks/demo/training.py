"""Trains one model without and with the shuffler, in alternating blocks of steps, and times both.

torchrun --nproc_per_node 2 -m benchmarks.demo.training MODEL OUTPUT.json
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.demo.models import parse_config
from commons.gin_values import from_gin
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, rank_process, run_rank, shard_model

WARM_UP_STEPS = 3
# Short blocks, so that what disturbs the machine for some seconds meets both arms.
BLOCKS, STEPS_PER_BLOCK = 32, 2
# Left out at either end of the blocks in order of speedup, as in any trimmed mean.
TRIMMED_BLOCKS = 4


class Arm:
    """One of the two runs: a model of its own, trained on the same batches as the other's."""

    def __init__(self, make_task: Callable[..., TrainingTask], balanced: bool, device: torch.device) -> None:
        args = replace(from_gin(TrainerArgs), enable_balanced_shuffler=balanced)
        task = make_task(args, device)
        model, optimizer = shard_model(task.model, from_gin(OptimizerArgs), device)
        self._pipeline = task.make_pipeline(args, model, optimizer, device)
        self._batches: Iterator[Any] = iter(task.train_dataset)
        self.losses: list[float] = []
        self.block_seconds: list[float] = []  # per step
        self.block_loads: list[
            np.ndarray
        ] = []  # sums of the largest load before, after, and of the mean load

    def run(self, steps: int, timed: bool) -> None:
        """Trains some steps; timed from when all ranks are ready to when all are done."""
        sums, tokens, reports = [], [], []
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            loss_sum, loss_tokens, _ = self._pipeline.progress(self._batches)
            sums.append(loss_sum)
            tokens.append(loss_tokens)
            reports.append(self._pipeline.report)
        dist.barrier()
        seconds = time.perf_counter() - start
        totals = torch.stack(sums).double()
        dist.all_reduce(totals)
        self.losses += (totals / torch.tensor(tokens)).tolist()
        if timed:
            self.block_seconds.append(seconds / steps)
            loads = [(r.loads_before.max(), r.loads_after.max(), r.loads_before.mean()) for r in reports]
            self.block_loads.append(np.sum(loads, axis=0))


def main() -> None:
    """Runs both arms and writes what was measured."""
    model, output = sys.argv[1:]
    make_task = parse_config(model)
    with rank_process() as device:
        arms = [Arm(make_task, balanced, device) for balanced in (False, True)]
        for arm in arms:
            arm.run(WARM_UP_STEPS, timed=False)
        blocks = range(BLOCKS)
        for block in tqdm(blocks, desc="train both ways", unit="block", disable=dist.get_rank() != 0):
            # First one, then the other first, so that neither has the better half of a drift.
            for arm in arms if block % 2 == 0 else arms[::-1]:
                arm.run(STEPS_PER_BLOCK, timed=True)
        if dist.get_rank() == 0:
            Path(output).write_text(json.dumps(_figures(*arms)))


def _figures(identity: Arm, balanced: Arm) -> dict[str, Any]:
    seconds = np.array([identity.block_seconds, balanced.block_seconds])
    in_order = np.argsort(seconds[0] / seconds[1])
    losses = np.array([identity.losses, balanced.losses])
    all_blocks = _speedup(identity, balanced, np.arange(BLOCKS))
    return {
        "ranks": dist.get_world_size(),
        **_speedup(identity, balanced, in_order[TRIMMED_BLOCKS : BLOCKS - TRIMMED_BLOCKS]),
        "max_relative_loss_difference": float((np.abs(losses[0] - losses[1]) / losses[0]).max()),
        "untrimmed": all_blocks,
        "seconds_per_step_of_blocks": {"identity": seconds[0].tolist(), "balanced": seconds[1].tolist()},
        "losses": {"identity": identity.losses, "balanced": balanced.losses},
    }


def _speedup(identity: Arm, balanced: Arm, blocks: np.ndarray) -> dict[str, Any]:
    """Imbalance, step times and speedup over some of the blocks."""
    before, after, mean = np.sum([balanced.block_loads[block] for block in blocks], axis=0)
    seconds = [float(np.mean([arm.block_seconds[block] for block in blocks])) for arm in (identity, balanced)]
    return {
        "steps": len(blocks) * STEPS_PER_BLOCK,
        "imbalance_before": before / mean,
        "imbalance_after": after / mean,
        "seconds_per_step_identity": seconds[0],
        "seconds_per_step_balanced": seconds[1],
        "speedup": seconds[0] / seconds[1],
        "speedup_predicted": before / after,
    }


if __name__ == "__main__":
    run_rank(main)
