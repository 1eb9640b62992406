"""A training run in which the last rank fails, for tests.

python -m tests.e2e.failing_rank GIN_FILE FAILURE

FAILURE is bad_id, forward, exchange, fetch_memory, fetch_slow, writing, terminated, or disk.
"""

import commons.quiet_logs  # noqa: F401  isort: skip
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import gin
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from commons.datasets import HSTUBatch
from commons.distributed import BatchShuffler
from commons.gin_values import from_gin
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, rank_process, run_rank, train
from hstu.models.hstu_encoder import HSTUEncoder
from hstu.training.ranking_task import ranking_task
from tests.commons.extensions.pieces.internals import InFlight, KeyFetch


def is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def strike_once(owner: object, method: str, call: int, strike: Callable[[], None]) -> None:
    """Makes the given call of a method strike the last rank. A restarted job is spared."""
    marker = Path("struck")

    def strike_last_rank(*_: Any) -> None:
        if is_last_rank() and not marker.exists():
            marker.touch()
            strike()

    before_call(owner, method, call, strike_last_rank)


def before_call(owner: object, method: str, call: int, act: Callable[..., None]) -> None:
    """Calls a function, with the same arguments, before the given call of a method."""
    original, numbers = getattr(owner, method), count(1)

    def act_and_call(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == call:
            act(*args)
        return original(*args, **kwargs)

    setattr(owner, method, act_and_call)


kill = partial(signal.raise_signal, signal.SIGKILL)  # like a machine that is lost
never_come_back = partial(time.sleep, 300)  # for longer than the other ranks wait


def wait_briefly(fetch: KeyFetch, *_: Any) -> None:
    """Lets the ranks of a fetch wait for each other for a second, where they would wait for minutes."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), fetch.group)


def run_out_of_memory() -> None:
    """Fails where no collective tells the other ranks."""
    raise MemoryError("no memory for a layer")


def fail() -> None:
    """Fails as a mistake in a model does."""
    raise IndexError("a mistake of the user's")


# By failure: the call that strikes the last rank.
STRIKES: dict[str, tuple[object, str, int, Callable[[], None]]] = {
    "forward": (HSTUEncoder, "forward", 3, fail),
    "exchange": (BatchShuffler, "exchange_rows", 9, kill),
    "fetch_memory": (InFlight, "land", 5, run_out_of_memory),
    "fetch_slow": (KeyFetch, "all_to_all", 5, never_come_back),
    "writing": (FileSystemWriter, "write_data", 2, kill),
    "terminated": (BatchShuffler, "exchange_rows", 5, partial(signal.raise_signal, signal.SIGTERM)),
}


def prepare(failure: str) -> None:
    """Arranges a failure, unless the task's own check of its batches has to fail."""
    if failure in STRIKES:
        strike_once(*STRIKES[failure])
    if failure == "fetch_slow":
        before_call(KeyFetch, "all_to_all", 5, wait_briefly)
        # Torchrun cannot end this rank for one that has not failed.
        sys.modules[run_rank.__module__].GRACE_S = 1.0  # type: ignore[attr-defined]
    if failure == "disk":  # writing beyond this size raises an OSError, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))


def fail_at_third_batch(task: TrainingTask) -> None:
    """Gives the last rank's third batch an invalid id."""
    check, numbers = task.check_batch, count(1)

    def spoil_and_check(batch: HSTUBatch) -> None:
        if next(numbers) == 3 and is_last_rank():
            batch.features.values()[0] = -1
        check(batch)

    task.check_batch = spoil_and_check


def main() -> None:
    gin_file, failure = sys.argv[1:]
    gin.parse_config_file(gin_file)
    prepare(failure)
    trainer, optimizer = from_gin(TrainerArgs), from_gin(OptimizerArgs)
    with rank_process() as device:
        task = ranking_task(trainer, device)
        if failure == "bad_id":
            fail_at_third_batch(task)
        train(task, trainer, optimizer, device)


if __name__ == "__main__":
    run_rank(main)
