"""A training run in which a rank fails at its third batch, or once, run by the tests beside this file.

python -m tests.e2e.failing_rank GIN_FILE FAILURE

FAILURE is bad_id, killed, stuck, placement, exchange, writing, terminated, disk, or none.
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import gin
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from commons.datasets import HSTUBatch
from commons.distributed import BatchShuffler, planner
from commons.distributed.placement import Placed
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
    place, numbers = planner.place_within, count(1)

    def place_or_fail(*args: Any) -> Placed:
        if next(numbers) == 3 and dist.get_rank() == 1:
            raise MemoryError("no memory to place the samples")
        return place(*args)

    planner.place_within = place_or_fail


def strike_once(owner: type, method: str, call: int, strike: Callable[[], None]) -> None:
    """Makes the given call of a method strike rank 1, the first time that the job gets there."""
    original, numbers, marker = getattr(owner, method), count(1), Path("struck")

    def strike_and_call(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == call and dist.get_rank() == 1 and not marker.exists():
            marker.touch()
            strike()
        return original(*args, **kwargs)

    setattr(owner, method, strike_and_call)


def kill() -> None:
    """As a machine that is lost."""
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    """As a cluster that wants its machine back."""
    os.kill(os.getpid(), signal.SIGTERM)


def linger() -> None:
    """As a file system that does not answer for a while."""
    time.sleep(3.5)


def prepare(failure: str) -> None:
    """What is to fail while training runs, of the failures that leave training to itself."""
    if failure == "exchange":
        strike_once(BatchShuffler, "exchange", 9, kill)
    elif failure == "writing":
        strike_once(FileSystemWriter, "write_data", 2, kill)
    elif failure == "terminated":
        strike_once(BatchShuffler, "exchange", 5, terminate)
    elif failure == "stuck":
        strike_once(BatchShuffler, "exchange", 5, linger)
    elif failure == "disk":  # a file that grows beyond this is an OSError, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))


def main() -> None:
    gin_file, failure = sys.argv[1:]
    gin.parse_config_file(gin_file)
    prepare(failure)
    if failure == "placement":
        gin.parse_config("TrainerArgs.enable_balanced_shuffler = True")
        fail_at_third_placement()
    trainer, optimizer = from_gin(TrainerArgs), from_gin(OptimizerArgs)
    with rank_process() as device:
        task = ranking_task(trainer, device)
        if failure in ("bad_id", "killed"):
            task.check_batch = spoil_third_batch(task.check_batch, failure)
        train(task, trainer, optimizer, device)


if __name__ == "__main__":
    run_rank(main)
