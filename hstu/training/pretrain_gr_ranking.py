"""Trains the HSTU ranking model.

torchrun --nproc_per_node 2 -m hstu.training.pretrain_gr_ranking --gin-config-file FILE
    [--gin-bindings "TrainerArgs.enable_balanced_shuffler=True" ...]
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
from commons.training import run_rank, train_from_gin
from hstu.training.ranking_task import ranking_task


def main() -> None:
    """Parses the command line and trains."""
    train_from_gin("Trains the HSTU ranking model.", ranking_task)


if __name__ == "__main__":
    run_rank(main)
