"""Trains the SID-GR model.

torchrun --nproc_per_node 2 -m sid_gr.training.pretrain_sid_gr --gin-config-file FILE
    [--gin-bindings "TrainerArgs.enable_balanced_shuffler=True" ...]
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
from commons.training import run_rank, train_from_gin
from sid_gr.training.sid_gr_task import sid_gr_task


def main() -> None:
    """Parses the command line and trains."""
    train_from_gin("Trains the SID-GR model.", sid_gr_task)


if __name__ == "__main__":
    run_rank(main)
