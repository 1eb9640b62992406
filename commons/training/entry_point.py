"""The command line of a training run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import gin
import torch
import torch.distributed as dist

from commons.gin_values import from_gin
from commons.perf_model.calibrate import summary
from commons.training.calibration import measure_steps
from commons.training.rank_process import rank_process
from commons.training.trainer import train
from commons.training.training_args import OptimizerArgs, TensorModelParallelArgs, TrainerArgs
from commons.training.training_task import TrainingTask

# What a calibration sets aside: loads are to differ, and the costs that a file names may not be there yet.
UNBALANCED = [
    "TrainerArgs.enable_balanced_shuffler = False",
    "TrainerArgs.single_rank_load = False",
    "TrainerArgs.balance_cost = 'flops'",
]


def train_from_gin(description: str, make_task: Callable[[TrainerArgs, torch.device], TrainingTask]) -> None:
    """Parses the command line, and trains what `make_task` makes of its gin settings.

    With `--calibrate FILE` it trains for a while, to measure what samples cost, and writes that instead.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--gin-config-file", required=True)
    parser.add_argument(
        "--gin-bindings", nargs="*", action="extend", default=[], help='as in "NetworkArgs.num_layers=2"'
    )
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="measure what samples cost, for balance_cost, and end"
    )
    parser.add_argument(
        "--calibrate-seconds", type=float, default=60.0, help="how long to measure (%(default)s)"
    )
    arguments = parser.parse_args()
    if not 0 <= arguments.calibrate_seconds < float("inf"):
        parser.error(f"--calibrate-seconds {arguments.calibrate_seconds}; expected a number of at least 0")
    if arguments.calibrate is not None and arguments.calibrate.is_dir():
        parser.error(f"--calibrate {arguments.calibrate} is a folder; expected a file to write")
    if not Path(arguments.gin_config_file).is_file():
        raise FileNotFoundError(f"--gin-config-file {arguments.gin_config_file} does not exist")
    bindings = arguments.gin_bindings
    if arguments.calibrate is not None:
        bindings = bindings + UNBALANCED
        arguments.calibrate.parent.mkdir(parents=True, exist_ok=True)
    gin.parse_config_files_and_bindings([arguments.gin_config_file], bindings)
    trainer, optimizer = from_gin(TrainerArgs), from_gin(OptimizerArgs)
    from_gin(TensorModelParallelArgs)  # refuses what does not run here
    with rank_process() as device:
        task = make_task(trainer, device)
        if arguments.calibrate is None:
            train(task, trainer, optimizer, device)
            return
        steps = measure_steps(task, trainer, optimizer, device, arguments.calibrate_seconds)
        if dist.get_rank() == 0:
            cost = steps.fit()
            cost.save(arguments.calibrate)
            print(summary(cost, steps))
