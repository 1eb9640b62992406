"""A training run in which the last rank fails, for tests.

python -m tests.e2e.failing_rank GIN_FILE FAILURE

FAILURE is one of `STRIKES`.
"""

import commons.quiet_logs  # noqa: F401  isort: skip
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import gin
import torch.distributed as dist

from commons.datasets.gin_values import from_gin
from commons.distributed import BatchShuffler
from commons.training import OptimizerArgs, TrainerArgs, rank_process, run_rank, train
from hstu.batch_shuffler import HSTUBatchShuffler
from hstu.models.hstu_encoder import HSTUEncoder
from hstu.training.ranking_task import ranking_task
from tests.commons.extensions.pieces.internals import KeyFetch


def fail(*_: object) -> None:
    """Fails as a mistake in a model does."""
    raise IndexError("a mistake of the user's")


def be_lost(*_: object) -> None:
    """Ends like a machine that is lost."""
    signal.raise_signal(signal.SIGKILL)


def never_come_back(*_: object) -> None:
    """Waits for longer than the other ranks do."""
    time.sleep(300)


def wait_briefly(fetch: KeyFetch, *_: object) -> None:
    """Lets the ranks of a fetch wait for each other for a second, where they would wait for minutes."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), fetch.group)
    # Torchrun cannot end this rank for one that has not failed.
    sys.modules[run_rank.__module__].GRACE_S = 1.0  # type: ignore[attr-defined]


# By failure: the method and its call that strikes the last rank, and what other ranks do there.
STRIKES: dict[str, tuple[object, str, int, Callable[..., None], Callable[..., None]]] = {
    "workloads": (HSTUBatchShuffler, "get_workloads", 3, fail, lambda *_: None),
    "forward": (HSTUEncoder, "forward", 3, fail, lambda *_: None),
    "exchange": (BatchShuffler, "exchange_rows", 9, be_lost, lambda *_: None),
    "fetch_slow": (KeyFetch, "all_to_all", 5, never_come_back, wait_briefly),
}


def strike_once(owner: object, method: str, call: int, strike: Callable, others: Callable) -> None:
    """Makes the given call of a method strike the last rank. A restarted job is spared."""
    original, numbers = getattr(owner, method), count(1)

    def act_and_call(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == call and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            is_last = dist.get_rank() == dist.get_world_size() - 1
            (strike if is_last else others)(*args)
        return original(*args, **kwargs)

    setattr(owner, method, act_and_call)


def main() -> None:
    gin_file, failure = sys.argv[1:]
    gin.parse_config_file(gin_file)
    strike_once(*STRIKES[failure])
    trainer, optimizer = from_gin(TrainerArgs), from_gin(OptimizerArgs)
    with rank_process() as device:
        train(ranking_task(trainer, device), trainer, optimizer, device)


if __name__ == "__main__":
    run_rank(main)
