"""Trains one model without the shuffler and with it, step by step in turn, and times all arms.

torchrun --nproc_per_node 2 -m benchmarks.demo.training MODEL OUTPUT.json
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.demo.models import parse_config
from benchmarks.machine import speedup_interval
from commons.distributed import BalanceReport
from commons.gin_values import from_gin
from commons.perf_model import Cost
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, rank_process, run_rank, shard_model

AS_LOADED, DEFAULT = "as loaded", "balanced (default)"
PIECES, LEARNED_PIECES = "split, unequal rows", "split by learned costs, unequal rows"
# By name, what differs from the gin files. A name lists the settings that differ from the defaults.
ARMS: dict[str, dict[str, Any]] = {
    AS_LOADED: {"enable_balanced_shuffler": False},
    DEFAULT: {"enable_balanced_shuffler": True},
    "Karmarkar–Karp, all_gather": {
        "enable_balanced_shuffler": True,
        "balance_partitioner": "karmarkar_karp",
        "balance_exchange": "all_gather",
    },
    PIECES: {
        "enable_balanced_shuffler": True,
        "balance_split": True,
        "balance_equal_rows": False,
    },
    LEARNED_PIECES: {
        "enable_balanced_shuffler": True,
        "balance_split": True,
        "balance_equal_rows": False,
        "balance_cost": "learned",
    },
}
WARM_UP_STEPS = 3
# All arms take a step in turn, so that what disturbs the machine for some seconds meets all of them.
STEPS = 52
# Left out at either end of the steps in order of speedup, as in any trimmed mean.
TRIMMED_STEPS = 7
# Costs are known from the 20th step on.
STEPS_TO_LEARN = 28


class Arm:
    """One of the runs: a model of its own, trained on the same batches as the others'.

    Args:
        make_task: makes the model, and its data.
        settings: what differs from the gin file.
        device: of this rank.
        batches: in place of the task's data.
    """

    def __init__(
        self,
        make_task: Callable[..., TrainingTask],
        settings: dict[str, Any],
        device: torch.device,
        batches: Iterator[Any] | None = None,
    ) -> None:
        args = replace(from_gin(TrainerArgs), **settings)
        task = make_task(args, device)
        model, optimizer = shard_model(task.model, from_gin(OptimizerArgs), device)
        self._pipeline = task.make_pipeline(args, model, optimizer, device)
        self._batches = iter(task.train_dataset) if batches is None else batches
        self.losses: list[float] = []
        self.block_seconds: list[float] = []  # per step
        self.block_reports: list[list[BalanceReport]] = []

    def learn_from(self, other: Arm) -> None:
        """Starts with the costs that another arm has learned; before the first step."""
        self._pipeline.load_learning_state(other._pipeline.learning_state())

    def learned_cost(self) -> Cost | None:
        """Returns what costs this arm has learned."""
        return self._pipeline.learned_cost()

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
        self.losses += (totals.cpu() / torch.tensor(tokens)).tolist()
        if timed:
            self.block_seconds.append(seconds / steps)
            self.block_reports.append(reports)


def main() -> None:
    """Runs all arms and writes what was measured."""
    arguments = parse_arguments(__doc__, model={}, output={"type": Path})
    model, output = arguments.model, arguments.output
    make_task = parse_config(model, long_histories=True)
    with rank_process() as device:
        arms = {name: Arm(make_task, settings, device) for name, settings in ARMS.items()}
        learning = Arm(make_task, ARMS[LEARNED_PIECES], device)
        learning.run(STEPS_TO_LEARN, timed=False)
        arms[LEARNED_PIECES].learn_from(learning)
        for arm in arms.values():
            arm.run(WARM_UP_STEPS, timed=False)
        in_turn = list(arms.values())
        for _ in tqdm(range(STEPS), desc="train each way", unit="step", disable=dist.get_rank() != 0):
            for arm in in_turn:
                arm.run(1, timed=True)
            in_turn.append(in_turn.pop(0))  # another is first next time: none has the better half of a drift
        if dist.get_rank() == 0:
            output.write_text(json.dumps(_figures(arms)))


def _figures(arms: dict[str, Arm]) -> dict[str, Any]:
    base = arms[AS_LOADED]
    balanced = {name: arm for name, arm in arms.items() if arm is not base}
    mean_seconds = np.mean([arm.block_seconds for arm in balanced.values()], axis=0)
    in_order = np.argsort(base.block_seconds / mean_seconds)
    trimmed = in_order[TRIMMED_STEPS : STEPS - TRIMMED_STEPS]
    by_flops, learned = (arms[name] for name in (PIECES, LEARNED_PIECES))
    comparisons = {name: _comparison(base, arm, trimmed) for name, arm in balanced.items()}
    comparisons[LEARNED_PIECES]["over_pieces_by_flops"] = {
        "speedup": sum(by_flops.block_seconds) / sum(learned.block_seconds),
        "speedup_interval": speedup_interval(by_flops.block_seconds, learned.block_seconds),
    }
    cost = learned.learned_cost()
    return {
        "ranks": dist.get_world_size(),
        "as_loaded": AS_LOADED,
        "balanced": comparisons,
        "learned_cost": None if cost is None else asdict(cost),
        "seconds_per_step_of_blocks": {name: arm.block_seconds for name, arm in arms.items()},
        "losses": {name: arm.losses for name, arm in arms.items()},
    }


def _comparison(base: Arm, arm: Arm, trimmed: np.ndarray) -> dict[str, Any]:
    losses = np.array([base.losses, arm.losses])
    interval = speedup_interval(base.block_seconds, arm.block_seconds)
    return {
        **_speedup(base, arm, trimmed),
        "max_relative_loss_difference": float((np.abs(losses[0] - losses[1]) / losses[0]).max()),
        "untrimmed": {**_speedup(base, arm, np.arange(STEPS)), "speedup_interval": interval},
    }


def _speedup(base: Arm, arm: Arm, blocks: np.ndarray) -> dict[str, Any]:
    """Imbalance, step times and speedup over some of the blocks."""
    reports = [report for block in blocks for report in arm.block_reports[block]]
    before, after = (
        sum(getattr(report, loads).max() for report in reports) for loads in ("loads_before", "loads_after")
    )
    mean = sum(report.loads_before.mean() for report in reports)
    seconds = [float(np.mean([run.block_seconds[block] for block in blocks])) for run in (base, arm)]
    return {
        "steps": len(blocks),
        "imbalance_before": before / mean,
        "imbalance_after": after / mean,
        "share_of_bytes_moved": sum(r.bytes_moved for r in reports) / sum(r.bytes_loaded for r in reports),
        "samples_cut_per_step": float(np.mean([report.samples_cut for report in reports])),
        "bytes_fetched_per_step": float(np.mean([report.bytes_fetched for report in reports])),
        "bytes_sent_per_step": float(np.mean([report.bytes_sent for report in reports])),
        "plan_wait_seconds_per_step": float(np.mean([report.plan_wait_seconds for report in reports])),
        "seconds_per_step_as_loaded": seconds[0],
        "seconds_per_step": seconds[1],
        "speedup": seconds[0] / seconds[1],
        "speedup_predicted": before / after,
    }


if __name__ == "__main__":
    run_rank(main)
