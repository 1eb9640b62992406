"""Measures learned costs when a rank is slow, and when FLOPs do not determine a model's time.

Trains the demo's model on two ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import gin
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.demo.training import Arm, parse_config, train_in_turn
from benchmarks.harness import Record, gather_from_ranks, keep_running, machine, run_on_ranks
from benchmarks.markdown import Cell, make_table, markdown_table
from commons.perf_model.compute_clock import ComputeClock
from commons.training import TrainingTask

RANKS, WARM_UP_STEPS, STEPS_PER_BLOCK = 2, 4, 2
BALANCED = {"pipeline_type": "none", "enable_balanced_shuffler": True, "balance_equal_rows": False}

# With a slow rank. Steps have twice the demo's rows, because turns on the core average out in longer steps.
FLOPS = BALANCED | {"train_batch_size": 32}
ARMS_WITH_SLOW_RANK = {"flops": FLOPS, "learned": FLOPS | {"balance_cost": "learned"}}
SLOW_RANK = 1
# By name: nicenesses of the processes that share the slow rank's core, and number of steps of each arm.
# A process at niceness 0 leaves half of the core, but 0.55 of the other rank's speed, which also drops.
PHASES: dict[str, tuple[tuple[int, ...], int]] = {
    "nothing slowed": ((), 70),
    "half": ((0, 8), 110),
    "nothing slowed again": ((), 70),
    "two thirds": ((2,), 110),
    "nothing slowed at last": ((), 70),
}

# With a model whose time is not proportional to its FLOPs.
REFINED = BALANCED | {"balance_partitioner": "refined"}
ARMS_WITH_DENSE_PART: dict[str, Record] = {
    "flops": REFINED,
    "learned": REFINED | {"balance_cost": "learned"},
}
# Sizes of the dense part. Each sample adds many rows, because a product's time is not proportional to its
# number of rows if they are few.
ROWS_PER_SAMPLE, WIDTH, LAYERS = 32, 512, 40
# Items per user are lognormal(3.5, 1.5), so that the dense part takes most of a step.
HISTORIES = ("history/RandomDistribution.mean = 102.0", "history/RandomDistribution.std = 297.1")
BLOCKS = 46

# Steps after a change that do not count. By their end, costs and speeds must be learned.
STEPS_TO_FOLLOW = 50


def measure() -> Record:
    """Returns the figures of both measurements."""
    return {
        "slow_rank": _summarize_slow_rank(run_on_ranks(RANKS, train_with_slow_rank, pinned=True)),
        "dense_part": _summarize_dense_part(run_on_ranks(RANKS, train_with_dense_part)),
        "machine": machine(),
    }


class LearningArm(Arm):
    """An arm with one setting of `balance_cost`, which also measures each step's compute time."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._clock = ComputeClock(self.model, arguments[2])
        self._compute_seconds: list[float] = []

    def take_step(self) -> None:
        """Trains one step, and records the compute time of this rank."""
        span = self._clock.begin()
        super().take_step()
        self._compute_seconds.append(span.seconds())

    def collect(self) -> Record:
        """Returns each step's seconds after the warm-up, and each rank's compute seconds. Collective."""
        by_rank = gather_from_ranks(self._compute_seconds[WARM_UP_STEPS:])
        return {
            "step_seconds": np.repeat(self.block_seconds, STEPS_PER_BLOCK).tolist(),
            "compute_seconds": np.transpose(by_rank).tolist(),
        }


def _load_epochs(task: TrainingTask) -> Iterator[Any]:
    for epoch in itertools.count():
        task.train_dataset.set_epoch(epoch, 0)
        yield from task.train_dataset


def train_with_slow_rank(device: torch.device) -> Record:
    """Trains through `PHASES`, in some of which one rank is slow. Returns each arm's measurements."""
    make_task = parse_config("hstu")
    arms = {
        name: LearningArm(make_task, settings, device, _load_epochs)
        for name, settings in ARMS_WITH_SLOW_RANK.items()
    }
    for phase, (nicenesses, steps) in PHASES.items():
        programs = [f"import os; os.nice({niceness})\nwhile True: pass" for niceness in nicenesses]
        with keep_running(*programs if dist.get_rank() == SLOW_RANK else ()):
            train_in_turn(arms.values(), steps // STEPS_PER_BLOCK, phase, STEPS_PER_BLOCK, WARM_UP_STEPS)
    return {name: arm.collect() for name, arm in arms.items()}


class WithDensePart(nn.Module):
    """A model with a tower of known cost per sample, whose FLOPs no workload counts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # A buffer, because ranks would have to reduce the gradient of a parameter.
        self.register_buffer("weight", nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)), persistent=False)

    def forward(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Returns the model's loss and output, after running the tower."""
        loss, output = self.model(batch)
        rows = batch.num_samples * ROWS_PER_SAMPLE
        dense = torch.ones(rows, WIDTH, device=loss.device, requires_grad=True)
        for _ in range(LAYERS):
            dense = dense @ self.weight
        return loss + 0.0 * dense.sum(), output


def train_with_dense_part(device: torch.device) -> Record:
    """Trains a model whose time is not proportional to its FLOPs, and returns each arm's measurements."""
    make_task = parse_config("hstu")
    gin.parse_config(HISTORIES)
    arms = {
        name: LearningArm(make_task, settings, device, _load_epochs, WithDensePart)
        for name, settings in ARMS_WITH_DENSE_PART.items()
    }
    train_in_turn(arms.values(), BLOCKS, "dense part", STEPS_PER_BLOCK, WARM_UP_STEPS)
    return {name: arm.collect() for name, arm in arms.items()}


def _summarize_slow_rank(measured: Record) -> list[Record]:
    """Returns a record for each phase, without its first `STEPS_TO_FOLLOW` steps."""
    records, first = [], 0
    for phase, (_, steps) in PHASES.items():
        counted = slice(first + STEPS_TO_FOLLOW, first + steps)
        flops, learned = (np.array(measured[name]["step_seconds"])[counted] for name in ("flops", "learned"))
        records.append(
            {
                "phase": phase,
                **{name: _summarize_arm(arm, counted) for name, arm in measured.items()},
                "speedup": round(float(flops.mean() / learned.mean()), 3),
                "speedup_quartiles": np.quantile(flops / learned, [0.25, 0.75]).round(3).tolist(),
            }
        )
        first += steps
    return records


def _summarize_dense_part(measured: Record) -> Record:
    """Returns step times and the spread of the ranks' times, without the first `STEPS_TO_FOLLOW` steps."""
    arms = {name: _summarize_arm(arm, slice(STEPS_TO_FOLLOW, None)) for name, arm in measured.items()}
    return {
        "spread": {name: round(arm["imbalance"] - 1, 4) for name, arm in arms.items()},
        "step_ms": {name: arm["step_ms"] for name, arm in arms.items()},
    }


def _summarize_arm(arm: Record, counted: slice) -> Record:
    compute = np.array(arm["compute_seconds"])[counted]
    return {
        "step_ms": round(float(np.mean(arm["step_seconds"][counted])) * 1e3, 1),
        "compute_ms": (compute.mean(0) * 1e3).round(1).tolist(),
        "imbalance": round(float((compute.max(1) / compute.mean(1)).mean()), 4),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    slow: dict[str, Cell] = {
        "rank 1 has": "{phase}",
        "by FLOPs, ms": "{flops[step_ms]:.0f}",
        "learned, ms": "{learned[step_ms]:.0f}",
        "speedup": "{speedup:.2f} ({speedup_quartiles[0]:.2f} to {speedup_quartiles[1]:.2f})",
        "rank 1's speed, measured": lambda record: (
            f"{record['flops']['compute_ms'][0] / record['flops']['compute_ms'][1]:.2f}"
        ),
        "measured imbalance": "{flops[imbalance]:.3f} / {learned[imbalance]:.3f}",
    }
    spreads, times = (figures["dense_part"][name].values() for name in ("spread", "step_ms"))
    rows = [
        ["largest ÷ mean time − 1", *(f"{spread:.1%}" for spread in spreads)],
        ["step, ms", *(f"{ms:.0f}" for ms in times)],
    ]
    return {
        "learning slow rank": make_table(figures["slow_rank"], slow),
        "learning dense part": markdown_table(["", "by FLOPs", "learned"], rows),
    }
