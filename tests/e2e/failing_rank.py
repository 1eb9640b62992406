"""A training run in which rank 1 fails at its third batch, run by `test_bad_input.py`.

python -m tests.e2e.failing_rank GIN_FILE (bad_id | killed | placement)
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import gin
import numpy as np
import torch.distributed as dist

from commons.datasets import HSTUBatch
from commons.distributed.placement import Placement
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


def fail_at_third_placement() -> None:
    """On rank 1 alone, behind the gather that would tell the others."""
    place, numbers = Placement.place, count(1)

    def place_or_fail(*args: Any) -> list[np.ndarray]:
        if next(numbers) == 3 and dist.get_rank() == 1:
            raise MemoryError("no memory to place the samples")
        return place(*args)

    Placement.place = place_or_fail  # type: ignore[method-assign]


def main() -> None:
    gin_file, failure = sys.argv[1:]
    gin.parse_config_file(gin_file)
    if failure == "placement":
        gin.parse_config("TrainerArgs.enable_balanced_shuffler = True")
        fail_at_third_placement()
    trainer, optimizer = from_gin(TrainerArgs), from_gin(OptimizerArgs)
    with rank_process() as device:
        task = ranking_task(trainer, device)
        if failure != "placement":
            task.check_batch = spoil_third_batch(task.check_batch, failure)
        train(task, trainer, optimizer, device)


if __name__ == "__main__":
    run_rank(main)
