"""The command line of a training run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ..check_equal import MakePipeline, check_equal
from ..datasets.gin_values import from_gin, is_bound, parse_gin
from ..local_paths import local_path
from .evaluation import evaluate_checkpoint
from .rank_process import rank_process
from .sharded_model import shard_model
from .trainer import train
from .training_args import OptimizerArgs, TensorModelParallelArgs, TrainerArgs
from .training_state import Progress, training_batches
from .training_task import TrainingTask

# Overrides for --check-equal: dropout, rounding, and Adam's division by tiny gradients would differ.
COMPARABLE = [
    "NetworkArgs.hidden_dropout = 0.0",
    "NetworkArgs.dtype_str = 'float32'",
    "OptimizerArgs.optimizer_str = 'sgd'",
]
# For --check-equal, unless the command line has a rate: a rate meant for Adam changes too little under SGD.
COMPARABLE_RATE = "OptimizerArgs.learning_rate = 0.1"


def train_from_gin(description: str, make_task: Callable[[TrainerArgs, torch.device], TrainingTask]) -> None:
    """Parses the command line, and trains the task that `make_task` creates from the gin settings.

    With `--check-equal STEPS`, only trains that many steps with balancing off and on, and compares the two.
    With `--evaluate FOLDER`, or without `OptimizerArgs`, as in a gin file for inference, evaluates the newest
    checkpoint of the folder, or of `ckpt_load_dir`, on the test set if there is one.
    """
    arguments = _arguments(description)
    compares = arguments.check_equal is not None
    bindings = arguments.gin_bindings
    if compares:
        bindings = [COMPARABLE_RATE, *bindings, *COMPARABLE]
    parse_gin(arguments.gin_config_file, bindings)
    trainer = from_gin(TrainerArgs)
    if arguments.evaluate is not None:
        trainer = replace(trainer, ckpt_load_dir=str(arguments.evaluate))
    optimizer = None if arguments.evaluate else _optimizer(trainer, must_train=compares)
    from_gin(TensorModelParallelArgs)  # refuses settings that do not run here
    with rank_process() as device:
        if compares and optimizer is not None:
            report = check_equal(_pipelines(trainer, optimizer, device, make_task), arguments.check_equal)
            if dist.get_rank() == 0:
                print(report)
            return
        task = make_task(trainer, device)
        if optimizer is None:
            evaluate_checkpoint(task, trainer, device)
        else:
            train(task, trainer, optimizer, device)


def _pipelines(
    trainer: TrainerArgs,
    optimizer_args: OptimizerArgs,
    device: torch.device,
    make_task: Callable[[TrainerArgs, torch.device], TrainingTask],
) -> MakePipeline:
    """Returns a function that makes a task's pipeline, with balancing on or off, and its batches."""

    def make_pipeline(enabled: bool) -> tuple[Any, Iterator[Any]]:
        single = enabled and trainer.single_rank_load  # only balancing spreads the samples
        args = replace(trainer, enable_balanced_shuffler=enabled, single_rank_load=single)
        task = make_task(args, device)
        model, optimizer = shard_model(task.model, optimizer_args, device)
        pipeline = task.make_pipeline(args, model, optimizer, device)
        return pipeline, training_batches(task, device, Progress())

    return make_pipeline


def _arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--gin-config-file", required=True, type=local_path)
    parser.add_argument(
        "--gin-bindings", nargs="*", action="extend", default=[], help='as in "NetworkArgs.num_layers=2"'
    )
    parser.add_argument(
        "--evaluate",
        type=local_path,
        metavar="FOLDER",
        help="evaluate the newest checkpoint in FOLDER, and exit",
    )
    parser.add_argument(
        "--check-equal",
        type=int,
        metavar="STEPS",
        help="train STEPS steps by SGD in float32 without dropout, balanced and not; compare, and exit. The "
        "learning rate is 0.1, unless --gin-bindings has OptimizerArgs.learning_rate",
    )
    arguments = parser.parse_args()
    if arguments.check_equal is not None and arguments.check_equal < 1:
        parser.error(f"--check-equal {arguments.check_equal}; expected a number of steps of at least 1")
    if not arguments.gin_config_file.is_file():
        raise FileNotFoundError(f"--gin-config-file {arguments.gin_config_file} does not exist")
    return arguments


def _optimizer(trainer: TrainerArgs, must_train: bool) -> OptimizerArgs | None:
    """Returns the optimizer that gin configures, or None if a checkpoint is to be evaluated instead."""
    if is_bound("OptimizerArgs.optimizer_str") or is_bound("OptimizerArgs.learning_rate"):
        return from_gin(OptimizerArgs)
    if must_train or not trainer.ckpt_load_dir:
        raise ValueError(
            "OptimizerArgs is not configured, as in a file for inference. To train, bind "
            '"OptimizerArgs.optimizer_str=\'adam\'" "OptimizerArgs.learning_rate=1e-3"; to evaluate a '
            "checkpoint instead, bind TrainerArgs.ckpt_load_dir"
        )
    return None
