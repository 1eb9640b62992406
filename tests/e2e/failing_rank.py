"""A training run in which rank 1 fails at its third batch, run by `test_bad_input.py`.

python -m tests.e2e.failing_rank GIN_FILE (bad_id | killed)
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import os
import signal
import sys
from collections.abc import Callable
from itertools import count

import gin
import torch.distributed as dist

from commons.datasets import HSTUBatch
from commons.gin_values import from_gin
from commons.training import OptimizerArgs, TrainerArgs, rank_process, run_rank, train
from hstu.training.ranking_task import ranking_task


def spoil_third_batch(check: Callable[[HSTUBatch], None], failure: str) -> Callable[[HSTUBatch], None]:
    """`check`, but on rank 1 the third batch is spoiled before."""
    numbers = count(1)

    def spoil_and_check(batch: HSTUBatch) -> None:
        if next(numbers) == 3 and dist.get_rank() == 1:
            if failure == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            batch.features.values()[0] = -1
        check(batch)

    return spoil_and_check


def main() -> None:
    gin_file, failure = sys.argv[1:]
    gin.parse_config_file(gin_file)
    trainer, optimizer = from_gin(TrainerArgs), from_gin(OptimizerArgs)
    with rank_process() as device:
        task = ranking_task(trainer, device)
        task.check_batch = spoil_third_batch(task.check_batch, failure)
        train(task, trainer, optimizer, device)


if __name__ == "__main__":
    run_rank(main)
