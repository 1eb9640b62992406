"""Compares measured costs with FLOPs as predictors of step times.

Runs the demo's model on two ranks, each on its own core. Every other step serves to fit the costs, and the
remaining steps validate them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from benchmarks.demo.training import parse_config
from benchmarks.harness import Record, machine, run_on_ranks
from commons.gin_values import from_gin
from commons.perf_model.calibrate import MeasuredSteps
from commons.training import OptimizerArgs, TrainerArgs
from commons.training.calibration import measure_steps

RANKS, SECONDS, SEED = 2, 120.0, 1


def measure() -> Record:
    """Returns the errors of predicted step times."""
    return {"prediction": run_on_ranks(RANKS, measure_on_rank, pinned=True), "machine": machine()}


def measure_on_rank(device: torch.device) -> Record:
    """Fits costs to every other step, and returns their errors in predicting the remaining steps."""
    make_task = parse_config("hstu")
    args = replace(from_gin(TrainerArgs), seed=SEED)
    steps = measure_steps(make_task(args, device), args, from_gin(OptimizerArgs), device, SECONDS)
    fitted, tried = (MeasuredSteps(steps.counts[i::2], steps.seconds[i::2]) for i in range(2))
    errors = {"measured_cost": tried.errors(fitted.fit()), "flops_alone": tried.errors_of_loads(fitted)}
    return {name: {"median": round(float(np.median(each)), 4)} for name, each in errors.items()}


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    text = "{measured_cost[median]:.1%}, of FLOPs alone {flops_alone[median]:.1%}"
    return {"calibration error": text.format(**figures["prediction"])}
