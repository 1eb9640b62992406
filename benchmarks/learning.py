"""Learned costs where a rank is slow, and where FLOPs do not tell a model's time.

Trains the demo's model on two ranks.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gin
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.demo.training import Arm, parse_config
from benchmarks.harness import Record, in_turn, machine, on_ranks
from benchmarks.markdown import Cell, table
from commons.training import TrainingTask

RANKS, WARM_UP_STEPS, STEPS_PER_BLOCK = 2, 4, 2
BALANCED = {"pipeline_type": "none", "enable_balanced_shuffler": True, "balance_equal_rows": False}

# A slow rank. Twice the demo's rows: in longer steps, turns on the core average out.
FLOPS = BALANCED | {"train_batch_size": 32}
ARMS_OF_SLOW_RANK = {"flops": FLOPS, "learned": FLOPS | {"balance_cost": "learned"}}
SLOW_RANK = 1
# By name: how nice the processes are that take turns with the slow rank on its core, and the steps of each
# arm. One at niceness 0 leaves it half of the core, but 0.55 of the other rank's speed: that drops, too.
PHASES: dict[str, tuple[tuple[int, ...], int]] = {
    "nothing slowed": ((), 70),
    "half": ((0, 8), 110),
    "nothing slowed again": ((), 70),
    "two thirds": ((2,), 110),
    "nothing slowed at last": ((), 70),
}

# A model whose time is not its FLOPs. The last arm trains on the same batch in every step.
REFINED = BALANCED | {"balance_partitioner": "refined"}
ARMS_OF_DENSE_PART: dict[str, Record] = {
    "flops": REFINED,
    "learned": REFINED | {"balance_cost": "learned"},
    "repeated": {"pipeline_type": "none", "enable_balanced_shuffler": False},
}
# Sizes of the dense part. Each sample brings many rows, because the time of a product with few is not
# proportional to them.
ROWS_PER_SAMPLE, WIDTH, LAYERS = 32, 512, 40
# Items per user are lognormal(3.5, 1.5), so that the dense part takes most of a step.
HISTORIES = ("history/RandomDistribution.mean = 102.0", "history/RandomDistribution.std = 297.1")
BLOCKS = 46

# Steps after a change that do not count: costs and speeds have to be learned by then.
STEPS_TO_FOLLOW = 50
# Predictions are fitted to at most this many steps, as those of learned costs are: up to the one whose times
# the planning gather has carried.
STEPS_OF_FIT, STEPS_IN_FLIGHT = 64, 8


def measure() -> Record:
    """Returns the figures of both measurements."""
    return {
        "slow_rank": _slow_rank_figures(on_ranks(RANKS, train_with_slow_rank, pinned=True)),
        "dense_part": _dense_part_figures(on_ranks(RANKS, train_with_dense_part)),
        "machine": machine(),
    }


class LearningArm(Arm):
    """A training with one setting of `balance_cost`, measured step by step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pipeline.time_steps()
        self._steps: dict[str, list[Any]] = {
            name: [] for name in ("compute_seconds", "predicted_seconds", "loads", "speeds")
        }

    def after_step(self) -> None:
        """Notes the time of this rank, and of all ranks the times, loads and speeds of the plan."""
        plan = self.pipeline.plan
        predicted = plan.predicted_seconds  # None before anything was learned
        self._steps["compute_seconds"].append(self.pipeline.compute_span.seconds())
        self._steps["predicted_seconds"].append(None if predicted is None else predicted.tolist())
        self._steps["loads"].append(plan.loads.tolist())
        self._steps["speeds"].append(self.pipeline.report.rank_speeds.round(4).tolist())

    def measured(self) -> Record:
        """Returns what was measured after the warm-up, step by step; collective."""
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, self._steps["compute_seconds"])
        steps = self._steps | {"compute_seconds": np.transpose(everyones).round(5).tolist()}
        seconds = np.repeat(self.block_seconds, STEPS_PER_BLOCK).round(5).tolist()
        return {"step_seconds": seconds} | {name: of[WARM_UP_STEPS:] for name, of in steps.items()}


def _epochs(task: TrainingTask) -> Iterator[Any]:
    for epoch in itertools.count():
        task.train_dataset.set_epoch(epoch, 0)
        yield from task.train_dataset


def _first_batch(task: TrainingTask) -> Iterator[Any]:
    return itertools.repeat(next(_epochs(task)))


@contextmanager
def _neighbors(nicenesses: tuple[int, ...]) -> Iterator[None]:
    """While active, processes take turns with this one on its core."""
    program = "import os, sys; os.nice(int(sys.argv[1]))\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", program, str(nice)]) for nice in nicenesses]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def train_with_slow_rank(device: torch.device) -> Record:
    """Trains on a rank that is slowed for a while, or beside it; returns what was measured by arm."""
    make_task = parse_config("hstu")
    arms = {
        name: LearningArm(make_task, settings, device, _epochs)
        for name, settings in ARMS_OF_SLOW_RANK.items()
    }
    for arm in arms.values():
        arm.run(WARM_UP_STEPS, timed=False)
    for phase, (nicenesses, steps) in PHASES.items():
        with _neighbors(nicenesses if dist.get_rank() == SLOW_RANK else ()):
            for arm in in_turn(arms.values(), steps // STEPS_PER_BLOCK, phase):
                arm.run(STEPS_PER_BLOCK)
    return {name: arm.measured() for name, arm in arms.items()}


class WithDensePart(nn.Module):
    """A model with a tower of known cost on every sample, whose FLOPs no workload counts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # No parameter: ranks would have to reduce its gradient.
        self.register_buffer("weight", nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)), persistent=False)

    def forward(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Returns the model's loss and output, after the tower."""
        loss, output = self.model(batch)
        rows = batch.num_samples * ROWS_PER_SAMPLE
        dense = torch.ones(rows, WIDTH, device=loss.device, requires_grad=True)
        for _ in range(LAYERS):
            dense = dense @ self.weight
        return loss + 0.0 * dense.sum(), output


def train_with_dense_part(device: torch.device) -> Record:
    """Trains on a rank a model whose time is not its FLOPs; returns what was measured by arm."""
    make_task = parse_config("hstu")
    gin.parse_config(HISTORIES)
    arms = {}
    for name, settings in ARMS_OF_DENSE_PART.items():
        batches = _first_batch if name == "repeated" else _epochs
        arms[name] = LearningArm(make_task, settings, device, batches, WithDensePart)
    for arm in arms.values():
        arm.run(WARM_UP_STEPS, timed=False)
    for arm in in_turn(arms.values(), BLOCKS, "dense part"):
        arm.run(STEPS_PER_BLOCK)
    return {name: arm.measured() for name, arm in arms.items()}


def _slow_rank_figures(measured: Record) -> list[Record]:
    """A record for each phase, of the steps after those to follow a change."""
    records, first = [], 0
    arms = {
        name: {key: np.array(of[key]) for key in ("step_seconds", "compute_seconds", "speeds")}
        for name, of in measured.items()
    }
    for phase, (_, steps) in PHASES.items():
        counted = slice(first + STEPS_TO_FOLLOW, first + steps)
        record: Record = {"phase": phase, "steps": steps - STEPS_TO_FOLLOW}
        for name, arm in arms.items():
            compute = arm["compute_seconds"][counted]
            record[name] = {
                "step_ms": _ms(arm["step_seconds"][counted].mean()),
                "compute_ms": [_ms(of_rank) for of_rank in compute.mean(0)],
                "imbalance": round(float((compute.max(1) / compute.mean(1)).mean()), 3),
            }
        speeds = arms["learned"]["speeds"][counted]
        record["speeds"] = [np.quantile(of_rank, [0, 0.5, 1]).round(3).tolist() for of_rank in speeds.T]
        flops, learned = (arms[name]["step_seconds"][counted] for name in ("flops", "learned"))
        record["speedup"] = round(float(flops.mean() / learned.mean()), 3)
        record["speedup_quartiles"] = np.quantile(flops / learned, [0.25, 0.75]).round(3).tolist()
        records.append(record)
        first += steps
    return records


def _dense_part_figures(measured: Record) -> Record:
    """Errors of predicted times, and how much ranks' times differ, after the steps to learn."""
    seconds = {name: np.array(of["compute_seconds"])[STEPS_TO_FOLLOW:] for name, of in measured.items()}
    flops, repeated = measured["flops"], measured["repeated"]["compute_seconds"]
    predicted = {
        "learned": np.array(measured["learned"]["predicted_seconds"][STEPS_TO_FOLLOW:]),
        "flops": _predicted_in_proportion(np.array(flops["loads"]), flops["compute_seconds"]),
        "repeated": _predicted_in_proportion(np.ones_like(repeated), repeated),
    }
    errors = {
        name: round(float(np.median(np.abs(of / seconds[name] - 1))), 4) for name, of in predicted.items()
    }
    balanced = ("flops", "learned")
    return {
        "steps": len(predicted["learned"]),
        "repeatability": errors.pop("repeated"),
        "error": errors,
        "spread": {
            name: round(float((seconds[name].max(1) / seconds[name].mean(1) - 1).mean()), 4)
            for name in balanced
        },
        "step_ms": {
            name: _ms(np.mean(measured[name]["step_seconds"][STEPS_TO_FOLLOW:])) for name in balanced
        },
    }


def _predicted_in_proportion(loads: np.ndarray, compute_seconds: list[list[float]]) -> np.ndarray:
    """float64 `[steps, ranks]`: loads in the unit of each rank that fits the steps before best."""
    seconds_per_load = np.array(compute_seconds) / loads
    units = []
    for step in range(STEPS_TO_FOLLOW, len(loads)):
        known = max(step - STEPS_IN_FLIGHT, 1)
        units.append(np.median(seconds_per_load[max(known - STEPS_OF_FIT, 0) : known], axis=0))
    return loads[STEPS_TO_FOLLOW:] * np.array(units)


def _ms(seconds: float) -> float:
    return round(float(seconds) * 1e3, 1)


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker."""
    speeds = "{{speeds[{0}][1]:.2f}} ({{speeds[{0}][0]:.2f}} to {{speeds[{0}][2]:.2f}})"
    slow: dict[str, Cell] = {
        "rank 1 has": "{phase}",
        "by FLOPs, ms": "{flops[step_ms]:.0f}",
        "learned, ms": "{learned[step_ms]:.0f}",
        "speedup": "{speedup:.2f} ({speedup_quartiles[0]:.2f} to {speedup_quartiles[1]:.2f})",
        "rank 1's speed, measured": lambda record: (
            f"{record['flops']['compute_ms'][0] / record['flops']['compute_ms'][1]:.2f}"
        ),
        "measured imbalance": "{flops[imbalance]:.3f} / {learned[imbalance]:.3f}",
        "speeds planned by": f"{speeds.format(0)} / {speeds.format(1)}",
    }
    dense, none = figures["dense_part"], "–"
    rows = [
        ("median error of predicted times", "error", ".1%", f"{dense['repeatability']:.1%}"),
        ("largest ÷ mean time − 1", "spread", ".1%", none),
        ("step, ms", "step_ms", ".0f", none),
    ]
    columns: dict[str, Cell] = {
        "": lambda row: row[0],
        "by FLOPs": lambda row: format(dense[row[1]]["flops"], row[2]),
        "learned": lambda row: format(dense[row[1]]["learned"], row[2]),
        "identical steps": lambda row: row[3],
    }
    return {
        "learning slow rank": table(figures["slow_rank"], slow),
        "learning dense part": table(rows, columns),
        "learning machine": "{cores} cores ({cpu}), torch {torch}, gloo.".format(**figures["machine"]),
    }
