"""Trains one model without and with the shuffler, in alternating steps, and times all arms."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gin
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import Record, bootstrap_speedup, take_turns
from commons.distributed import BalanceReport
from commons.extensions.learned_costs import LearnedCosts
from commons.gin_values import from_gin
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, shard_model

# Names of modules, because gin cannot configure equally named configurables of two models in one process.
TASKS = {
    "hstu": ("hstu.training.ranking_task", "ranking_task"),
    "sid_gr": ("sid_gr.training.sid_gr_task", "sid_gr_task"),
}
AS_LOADED, DEFAULT = "as loaded", "balanced (default)"
PIECES, LEARNED_PIECES = "pieces, unequal rows", "pieces by learned costs, unequal rows"
# Settings that differ from the gin files, by arm. An arm's name lists its settings that are not defaults.
ARMS: dict[str, dict[str, Any]] = {
    AS_LOADED: {"enable_balanced_shuffler": False},
    DEFAULT: {"enable_balanced_shuffler": True},
    "Karmarkar–Karp, all_gather": {
        "enable_balanced_shuffler": True,
        "balance_partitioner": "karmarkar_karp",
        "balance_exchange": "all_gather",
    },
    PIECES: {"enable_balanced_shuffler": True, "balance_split": True, "balance_equal_rows": False},
    LEARNED_PIECES: {
        "enable_balanced_shuffler": True,
        "balance_split": True,
        "balance_equal_rows": False,
        "balance_cost": "learned",
    },
}
# Arms that the demo shows. The tables of the benchmarks show all arms.
SHOWN = (AS_LOADED, DEFAULT, PIECES)
WARM_UP_STEPS = 3
# All arms take steps in turn, so that a disturbance of some seconds affects all of them.
STEPS = 52
# Learned costs are available from the 20th step on.
STEPS_TO_LEARN = 28


def parse_config(model: str, long_histories: bool = False) -> Callable[..., TrainingTask]:
    """Parses the model's gin file, and returns the function that makes its task.

    Args:
        model: a key of `TASKS`.
        long_histories: whether to also parse a file of histories that only pieces can balance.
    """
    module, function = TASKS[model]
    make_task = getattr(importlib.import_module(module), function)
    for name in [model] + [f"{model}_long"] * long_histories:
        gin.parse_config_file(str(Path(__file__).parent / f"{name}.gin"))
    return make_task


class Arm:
    """One of several runs that are compared. Each trains its own model on the same batches.

    Args:
        make_task: function that makes the model and its data.
        settings: fields of `TrainerArgs` that differ from the gin file.
        device: this rank's device.
        batches: function that returns the batches of a task.
        with_part: function that adds a part to the model.

    Attributes:
        model: the sharded model.
        losses: mean loss of each step over all ranks, warm-up included.
        block_seconds: seconds per step of each timed block.
        reports: reports of all steps in timed blocks.
    """

    def __init__(
        self,
        make_task: Callable[..., TrainingTask],
        settings: Record,
        device: torch.device,
        batches: Callable[[TrainingTask], Iterable[Any]] = lambda task: task.train_dataset,
        with_part: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        args = replace(from_gin(TrainerArgs), **settings)
        task = make_task(args, device)
        task = replace(task, model=with_part(task.model))
        self.model, optimizer = shard_model(task.model, from_gin(OptimizerArgs), device)
        shuffler = task.make_shuffler(args)
        self.pipeline = task.make_pipeline(args, self.model, optimizer, device, shuffler)
        self._extensions = shuffler.extensions
        self._batches = iter(batches(task))
        self.losses: list[float] = []
        self.block_seconds: list[float] = []
        self.reports: list[BalanceReport] = []

    def run(self, steps: int, timed: bool = True) -> None:
        """Trains for `steps` steps, and measures the time between barriers before and after them."""
        sums, tokens, reports = [], [], []
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.take_step()
            sums.append(self.pipeline.loss_sum)
            tokens.append(self.pipeline.loss_tokens)
            reports.append(self.pipeline.report)
        dist.barrier()
        seconds = time.perf_counter() - start
        totals = torch.stack(sums).double()
        dist.all_reduce(totals)
        self.losses += (totals.cpu() / torch.tensor(tokens)).tolist()
        if timed:
            self.block_seconds.append(seconds / steps)
            self.reports += reports

    def take_step(self) -> None:
        """Trains one step."""
        self.pipeline.progress(self._batches)

    @property
    def learned_costs(self) -> LearnedCosts:
        """The extension that learns this arm's costs."""
        return next(extension for extension in self._extensions if isinstance(extension, LearnedCosts))


def train_in_turn(
    arms: Iterable[Arm], blocks: int, what: str, steps_per_block: int = 1, warm_up_steps: int = 2
) -> None:
    """Warms up arms that are new, then trains all arms in turn, for `blocks` timed blocks each."""
    arms = list(arms)
    for arm in arms:
        if not arm.losses:
            arm.run(warm_up_steps, timed=False)
    for arm in take_turns(arms, blocks, what):
        arm.run(steps_per_block)


def compare_times(before: Arm, after: Arm) -> Record:
    """Returns the speedup over all timed blocks, with its 95% confidence interval."""
    return {
        "speedup": sum(before.block_seconds) / sum(after.block_seconds),
        "speedup_interval": bootstrap_speedup(before.block_seconds, after.block_seconds),
    }


def train(device: torch.device, model: str, *names: str) -> Record:
    """Trains the arms of these names on this rank, and returns their comparison."""
    make_task = parse_config(model, long_histories=True)
    arms = {name: Arm(make_task, ARMS[name], device) for name in names}
    if LEARNED_PIECES in arms:
        learning = Arm(make_task, ARMS[LEARNED_PIECES], device)
        learning.run(STEPS_TO_LEARN, timed=False)
        arms[LEARNED_PIECES].learned_costs.load_state(learning.learned_costs.state())
    train_in_turn(arms.values(), STEPS, "train each way", warm_up_steps=WARM_UP_STEPS)
    comparisons = {name: _compare(arms[AS_LOADED], arm) for name, arm in arms.items() if name != AS_LOADED}
    cost = None
    if LEARNED_PIECES in arms:
        over_pieces = compare_times(arms[PIECES], arms[LEARNED_PIECES])
        comparisons[LEARNED_PIECES]["over_pieces_by_flops"] = over_pieces
        cost = arms[LEARNED_PIECES].learned_costs.cost()
    return {
        "ranks": dist.get_world_size(),
        "balanced": comparisons,
        "learned_cost": None if cost is None else asdict(cost),
        "losses": {name: arm.losses for name, arm in arms.items()},
    }


def _compare(base: Arm, arm: Arm) -> Record:
    """Returns the difference of losses, and imbalance, step times, and speedup over all steps."""
    losses = np.array([base.losses, arm.losses])
    reports = arm.reports
    before, after = (
        sum(getattr(report, loads).max() for report in reports) for loads in ("loads_before", "loads_after")
    )
    mean = sum(report.loads_before.mean() for report in reports)
    moved = sum(report.bytes_moved for report in reports)
    loaded = sum(report.bytes_loaded for report in reports)
    return {
        "max_relative_loss_difference": float((np.abs(losses[0] - losses[1]) / losses[0]).max()),
        "untrimmed": {
            "steps": STEPS,
            "imbalance_before": before / mean,
            "imbalance_after": after / mean,
            "share_of_bytes_moved": moved / loaded,
            **{
                f"{name}_per_step": float(np.mean([report.extensions.get(name, 0) for report in reports]))
                for name in ("samples_cut", "bytes_fetched")
            },
            "bytes_sent_per_step": float(np.mean([report.bytes_sent for report in reports])),
            "seconds_per_step_as_loaded": float(np.mean(base.block_seconds)),
            "seconds_per_step": float(np.mean(arm.block_seconds)),
            "speedup_predicted": before / after,
            **compare_times(base, arm),
        },
    }
