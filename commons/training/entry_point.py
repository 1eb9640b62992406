"""The command line of a training run."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import gin
import torch

from commons.gin_values import from_gin
from commons.training.rank_process import rank_process
from commons.training.trainer import train
from commons.training.training_args import OptimizerArgs, TensorModelParallelArgs, TrainerArgs
from commons.training.training_task import TrainingTask


def train_from_gin(description: str, make_task: Callable[[TrainerArgs, torch.device], TrainingTask]) -> None:
    """Parses `--gin-config-file` and `--gin-bindings`, and trains what `make_task` makes of them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--gin-config-file", required=True)
    parser.add_argument(
        "--gin-bindings", nargs="*", action="extend", default=[], help='as in "NetworkArgs.num_layers=2"'
    )
    arguments = parser.parse_args()
    gin.parse_config_files_and_bindings([arguments.gin_config_file], arguments.gin_bindings)
    trainer, optimizer = from_gin(TrainerArgs), from_gin(OptimizerArgs)
    from_gin(TensorModelParallelArgs)  # refuses what does not run here
    with rank_process() as device:
        train(make_task(trainer, device), trainer, optimizer, device)
