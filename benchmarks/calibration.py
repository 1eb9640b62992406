"""Measures how well measured costs predict times, compared with FLOPs, and how well they balance ranks.

Runs the demo's model on two ranks, each on its own core. Costs are fitted to every other step and validated
on the rest. Then steps are balanced in each way, and the two shares of a step are computed four times, with
the ranks trading places: the cores of a shared machine differ from each other, and from second to second, by
more than balanced shares do. The difference for identical samples on both ranks is the machine's own noise,
which no balancing removes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.demo.training import parse_config
from benchmarks.harness import Record, machine, on_ranks, progress
from commons.distributed.rank_group import RankGroup
from commons.gin_values import from_gin
from commons.pipeline.compute_clock import ComputeClock
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, shard_model
from commons.training.calibration import measure_steps

RANKS = 2
SECONDS = 120.0
STEPS, WARM_UP_STEPS = 20, 4
# Share of a step that a rank computes: its own (0) or the other's (1). A drift in time cancels out.
TURNS = (0, 1, 1, 0)
SEED_OF_COSTS, SEED_OF_SHARES = 1, 2


def measure() -> Record:
    """Returns errors of predicted times, and how far the two ranks' times are apart, by way of balancing."""
    with TemporaryDirectory() as folder:
        figures = on_ranks(RANKS, measure_on_rank, Path(folder) / "cost.json", pinned=True)
    return {"ranks": RANKS, **figures, "machine": machine()}


def measure_on_rank(device: torch.device, cost_file: str) -> Record:
    """Measures costs, then steps that are balanced by them."""
    make_task = parse_config("hstu")
    args = replace(from_gin(TrainerArgs), seed=SEED_OF_COSTS)
    steps = measure_steps(make_task(args, device), args, from_gin(OptimizerArgs), device, SECONDS)
    fitted, tried = steps.every_other(0), steps.every_other(1)
    cost = fitted.fit()
    if dist.get_rank() == 0:
        cost.save(Path(cost_file))
    dist.barrier()
    errors = {"measured_cost": tried.errors(cost), "flops_alone": tried.errors_of_loads(fitted)}
    args = replace(from_gin(TrainerArgs), seed=SEED_OF_SHARES, enable_balanced_shuffler=False)
    return {
        "prediction": {
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
        },
        "rank_times": _differences(make_task(args, device), args, cost_file, device),
    }


def _differences(task: TrainingTask, args: TrainerArgs, cost: str, device: torch.device) -> Record:
    """Returns relative differences between the times of a step's two shares, by way of balancing."""
    model, optimizer = shard_model(task.model, from_gin(OptimizerArgs), device)
    pipeline = task.make_pipeline(args, model, optimizer, device)
    clock = ComputeClock(model, device)
    loaded = list(itertools.islice(iter(task.train_dataset), STEPS))
    on = replace(args, enable_balanced_shuffler=True, balance_partitioner="refined")
    ways = {"as loaded": args, "by FLOPs": on, "by measured cost": replace(on, balance_cost=cost)}
    shares = {name: _shares(task, of_way, loaded) for name, of_way in ways.items()}
    # [ranks][steps], like the others
    shares["the same samples on both"] = [shares["as loaded"][0]] * RANKS
    order = [
        (name, shares[name][(dist.get_rank() + turn) % RANKS][step])
        for step in range(STEPS)
        for name in shares
        for turn in TURNS
    ]
    seconds: dict[str, list[float]] = {name: [] for name in shares}
    batches = iter([batch for _, batch in order[:WARM_UP_STEPS] + order])
    for _ in range(WARM_UP_STEPS):
        pipeline.progress(batches)
    for name, _ in progress(order, "balanced each way"):
        clock.begin()
        pipeline.progress(batches)
        span = clock.span()
        if span is None:
            raise RuntimeError("a step without a backward cannot be timed")
        seconds[name].append(span.seconds())
    return {
        name: _apart(np.array(RankGroup.of().channel().all_gather_objects(of_rank)))
        for name, of_rank in seconds.items()
    }


def _shares(task: TrainingTask, args: TrainerArgs, loaded: list[Any]) -> list[list[Any]]:
    """Returns each rank's batches after the exchange, `[ranks][steps]`."""
    shuffler = task.make_shuffler(args)
    with torch.no_grad():  # their losses are not scaled, because only times count
        shuffled = [shuffler.shuffle(batch) for batch in loaded]
    return RankGroup.of().channel().all_gather_objects(shuffled)


def _apart(seconds: np.ndarray) -> dict[str, float]:
    """Summarizes times, float64 `[ranks, steps · turns]`, in the order of `TURNS`."""
    by_turn = seconds.reshape(RANKS, STEPS, len(TURNS))
    own, other = (by_turn[:, :, [turn == which for turn in TURNS]].mean(2) for which in (0, 1))
    changing_places = own + other[::-1]  # [shares, steps]: each share on both cores

    def median_difference(times: np.ndarray) -> float:
        return round(float(np.median((times.max(0) - times.min(0)) / times.mean(0))), 4)

    return {
        "median_difference": median_difference(changing_places),
        "largest_over_mean": round(float(changing_places.max(0).sum() / changing_places.mean(0).sum()), 4),
        "median_difference_of_single_runs": median_difference(seconds),
    }
