"""Trains one model without and with the shuffler, in alternating steps, and times all arms."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gin
import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import Arm, Record, compare_times, train_in_turn
from commons.datasets.gin_values import from_gin
from commons.extensions.learned_costs import LearnedCosts
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


def make_arm(
    make_task: Callable[..., TrainingTask],
    settings: Record,
    device: torch.device,
    batches: Iterable[Any] | None = None,
) -> Arm:
    """Returns a run of its own model.

    Args:
        make_task: function that makes the model and its data.
        settings: fields of `TrainerArgs` that differ from the gin file.
        device: this rank's device.
        batches: batches in place of the task's.
    """
    args = replace(from_gin(TrainerArgs), **settings)
    task = make_task(args, device)
    model, optimizer = shard_model(task.model, from_gin(OptimizerArgs), device)
    pipeline = task.make_pipeline(args, model, optimizer, device)
    return Arm(pipeline, task.train_dataset if batches is None else batches)


def find_learned_costs(arm: Arm) -> LearnedCosts:
    """Returns the extension that learns an arm's costs."""
    extensions = arm.pipeline._stage._shuffler.extensions
    return next(extension for extension in extensions if isinstance(extension, LearnedCosts))


def train(device: torch.device, model: str, *names: str) -> Record:
    """Trains the arms of these names on this rank, and returns their comparison."""
    make_task = parse_config(model, long_histories=True)
    arms = {name: make_arm(make_task, ARMS[name], device) for name in names}
    if LEARNED_PIECES in arms:
        learning = make_arm(make_task, ARMS[LEARNED_PIECES], device)
        learning.run(STEPS_TO_LEARN, timed=False)
        find_learned_costs(arms[LEARNED_PIECES]).load_state(find_learned_costs(learning).state())
    train_in_turn(arms.values(), STEPS, "train each way", warm_up_steps=WARM_UP_STEPS)
    comparisons = {name: _compare(arms[AS_LOADED], arm) for name, arm in arms.items() if name != AS_LOADED}
    cost = None
    if LEARNED_PIECES in arms:
        over_pieces = compare_times(arms[PIECES], arms[LEARNED_PIECES])
        comparisons[LEARNED_PIECES]["over_pieces_by_flops"] = over_pieces
        cost = find_learned_costs(arms[LEARNED_PIECES]).cost()
    return {
        "ranks": dist.get_world_size(),
        "balanced": comparisons,
        "learned_cost": None if cost is None else asdict(cost),
        "losses": {name: arm.losses for name, arm in arms.items()},
    }


def _compare(base: Arm, arm: Arm) -> Record:
    """Returns the difference of losses, and imbalance, step times, and speedup over all steps."""
    reports = arm.reports
    before, after = (
        sum(getattr(report, loads).max() for report in reports) for loads in ("loads_before", "loads_after")
    )
    mean = sum(report.loads_before.mean() for report in reports)
    moved = sum(report.bytes_moved for report in reports)
    loaded = sum(report.bytes_loaded for report in reports)
    return {
        "max_relative_loss_difference": arm.difference_of_losses(base),
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
