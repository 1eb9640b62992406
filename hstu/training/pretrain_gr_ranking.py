"""Trains the HSTU ranking model.

torchrun --nproc_per_node 2 -m hstu.training.pretrain_gr_ranking --gin-config-file FILE
    [--gin-bindings "TrainerArgs.enable_balanced_shuffler=True" ...]
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse

import gin

from commons.gin_values import from_gin
from commons.training import (
    OptimizerArgs,
    TensorModelParallelArgs,
    TrainerArgs,
    rank_process,
    run_rank,
    train,
)
from hstu.training.ranking_task import ranking_task


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(description="Trains the HSTU ranking model.")
    parser.add_argument("--gin-config-file", required=True)
    parser.add_argument(
        "--gin-bindings", nargs="*", action="extend", default=[], help='as in "NetworkArgs.num_layers=2"'
    )
    arguments = parser.parse_args()
    gin.parse_config_files_and_bindings([arguments.gin_config_file], arguments.gin_bindings)
    trainer, optimizer = from_gin(TrainerArgs), from_gin(OptimizerArgs)
    from_gin(TensorModelParallelArgs)  # refuses what does not run here
    with rank_process() as device:
        train(ranking_task(trainer, device), trainer, optimizer, device)


if __name__ == "__main__":
    run_rank(main)
