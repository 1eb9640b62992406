"""Measured costs: how well they predict, beside FLOPs, and how alike ranks' times are when balanced by them.

Two ranks, each on a core of its own, and the demo's model. Costs are fitted to every other step, and tried on
those in between. How far the ranks' times lie apart when both compute the very same samples is what the
machine adds, and no balancing removes:

    python -m benchmarks.calibration
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.demo.models import parse_config
from benchmarks.machine import machine
from benchmarks.torchrun import torchrun
from commons.distributed.rank_group import all_gather_object
from commons.gin_values import from_gin
from commons.perf_model import MeasuredCost
from commons.perf_model.calibrate import MeasuredSteps
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, rank_process, run_rank, shard_model
from commons.training.calibration import measure_steps

RESULT = Path(__file__).parent / "results" / "calibration.json"
RANKS = 2
SECONDS = 120.0
# Short blocks, so that what disturbs the machine for some seconds meets all arms.
BLOCKS, STEPS_PER_BLOCK, WARM_UP_STEPS = 12, 3, 3
SEED_OF_COSTS, SEED_OF_ARMS = 1, 2


SAME_SAMPLES = "the same samples on both"


class Arm:
    """One way of balancing: a model of its own, trained on the same batches as the others'."""

    def __init__(
        self, make_task: Callable[..., TrainingTask], args: TrainerArgs, device: torch.device
    ) -> None:
        task = make_task(args, device)
        model, optimizer = shard_model(task.model, from_gin(OptimizerArgs), device)
        self._pipeline = task.make_pipeline(args, model, optimizer, device)
        self._batches: Iterator[Any] = iter(task.train_dataset)
        self.seconds: list[float] = []  # of this rank, per step
        self.imbalance: list[float] = []  # as planned

    def load_what_rank_0_does(self) -> None:
        """Makes the batches of all ranks those of rank 0."""
        batches = list(itertools.islice(self._batches, WARM_UP_STEPS + BLOCKS * STEPS_PER_BLOCK + 2))
        self._batches = iter(all_gather_object(batches, None)[0])

    def run(self, steps: int) -> None:
        """Trains some steps."""
        for _ in range(steps):
            self._pipeline.progress(self._batches)
            self.seconds.append(self._pipeline.compute_span.seconds())
            self.imbalance.append(self._pipeline.report.imbalance_after)


def main() -> None:
    """Measures, prints the figures and writes them to `RESULT`."""
    if len(sys.argv) == 1:
        with TemporaryDirectory() as folder:
            torchrun(RANKS, "benchmarks.calibration", folder)
            figures = json.loads((Path(folder) / "figures.json").read_text())
        figures = {"ranks": RANKS, **figures, "machine": machine()}
        print(json.dumps(figures, indent=1))
        RESULT.write_text(json.dumps(figures, indent=1) + "\n")
        return
    run_rank(lambda: _on_a_rank(Path(sys.argv[1])))


def _on_a_rank(folder: Path) -> None:
    make_task = parse_config("hstu")
    os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"])})
    with rank_process() as device:
        args = replace(from_gin(TrainerArgs), seed=SEED_OF_COSTS)
        steps = measure_steps(make_task(args, device), args, from_gin(OptimizerArgs), device, SECONDS)
        fitted, tried = steps.every_other(0), steps.every_other(1)
        cost = fitted.fit()
        if dist.get_rank() == 0:
            cost.save(folder / "cost.json")
        dist.barrier()
        differences = _differences(make_task, str(folder / "cost.json"), device)
        if dist.get_rank() == 0:
            figures = {"prediction": _prediction(cost, fitted, tried), "rank_times": differences}
            (folder / "figures.json").write_text(json.dumps(figures))


def _prediction(cost: MeasuredCost, fitted: MeasuredSteps, tried: MeasuredSteps) -> dict[str, Any]:
    """Relative errors of predicted times of batches that nothing was fitted to."""
    errors = {"measured_cost": tried.errors(cost), "flops_alone": tried.errors_of_loads(fitted)}
    return {
        "steps_fitted": len(fitted.seconds),
        "steps_tried": len(tried.seconds),
        "error_of_the_fit": round(cost.median_error, 4),
        **{
            name: {
                "median": round(float(np.median(of_one)), 4),
                "p90": round(float(np.quantile(of_one, 0.9)), 4),
            }
            for name, of_one in errors.items()
        },
    }


def _differences(
    make_task: Callable[..., TrainingTask], cost: str, device: torch.device
) -> dict[str, dict[str, float]]:
    """By way of balancing, how far the ranks' times of a step lie apart, relative to their mean."""
    args = replace(from_gin(TrainerArgs), seed=SEED_OF_ARMS)
    settings = {
        SAME_SAMPLES: {"enable_balanced_shuffler": False},
        "as loaded": {"enable_balanced_shuffler": False},
        "by FLOPs": {"enable_balanced_shuffler": True},
        "by measured cost": {"enable_balanced_shuffler": True, "balance_cost": cost},
    }
    arms = {name: Arm(make_task, replace(args, **of_arm), device) for name, of_arm in settings.items()}
    arms[SAME_SAMPLES].load_what_rank_0_does()
    for arm in arms.values():
        arm.run(WARM_UP_STEPS)
    for _ in tqdm(range(BLOCKS), desc="balanced each way", disable=dist.get_rank() != 0):
        for arm in arms.values():
            arm.run(STEPS_PER_BLOCK)
    found = {}
    for name, arm in arms.items():
        of_ranks = np.array(all_gather_object(arm.seconds[WARM_UP_STEPS:], None))
        apart = (of_ranks.max(0) - of_ranks.min(0)) / of_ranks.mean(0)
        medians = np.median(of_ranks, axis=1)
        found[name] = {
            "median_difference": round(float(np.median(apart)), 4),
            "difference_of_medians": round(float((medians.max() - medians.min()) / medians.mean()), 4),
            "largest_over_mean": round(float(of_ranks.max(0).sum() / of_ranks.mean(0).sum()), 4),
            "planned_imbalance": round(float(np.mean(arm.imbalance[WARM_UP_STEPS:])), 4),
        }
    return found


if __name__ == "__main__":
    main()
