"""Trains the HSTU retrieval model.

torchrun --nproc_per_node 2 -m hstu.training.pretrain_gr_retrieval --gin-config-file FILE
    [--gin-bindings "TrainerArgs.enable_balanced_shuffler=True" ...]
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
from commons.training import run_rank, train_from_gin
from hstu.training.retrieval_task import retrieval_task


def main() -> None:
    """Parses the command line and trains."""
    train_from_gin("Trains the HSTU retrieval model.", retrieval_task)


if __name__ == "__main__":
    run_rank(main)
