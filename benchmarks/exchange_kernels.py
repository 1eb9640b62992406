"""Counts an exchange's kernels and host waits on a recorded GPU, and measures its CPU time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import Record, run_on_ranks, summarize, time_call, time_ms
from benchmarks.markdown import make_table
from commons.distributed import BatchShuffler
from commons.sequence_batch import BaseBatch
from commons.sequence_batch.rows import Rows
from tests.gradient_models import CASES
from tests.recorded_cuda import modes

RANKS, ROWS, EXCHANGES, WARM_UP = 2, 6, 200, 20


class AllMove(BatchShuffler):
    """A shuffler in which the rows of rank 1 cost most, so that some rows move."""

    def get_workloads(self, batch: Any) -> torch.Tensor:
        """Returns costs that are ten times as large on rank 1."""
        return torch.arange(1, 1 + self.view(batch).num_rows) * (1 + 9 * dist.get_rank())


def measure() -> Record:
    """Returns the figures of each kind of batch."""
    return {"batches": run_on_ranks(RANKS, count_and_time)}


def count_and_time(device: torch.device) -> list[Record]:
    """Counts this rank's kernels and waits for each kind of batch, and times its exchanges."""
    figures = []
    for name, make in BATCHES.items():
        shuffler, batch = AllMove(), make()
        plan = shuffler.plan(batch)
        cpu_ms = _time(partial(shuffler.exchange, batch, plan))
        figures.append({"batch": name, **count(name), "cpu_ms": summarize(cpu_ms)})
    return figures


def count(name: str) -> Record:
    """Returns the numbers of kernels, collectives, and host waits in an exchange on a recorded GPU."""
    os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    with modes.recorded_cuda() as gpu, torch.no_grad():
        shuffler, batch = AllMove(), BATCHES[name]()
        plan = shuffler.plan(batch)
        loaded = Rows(batch).pin_memory().to(modes.CUDA, non_blocking=True).batch
        gpu.clear()
        shuffler.exchange(loaded, plan)
        kernels = sum(number for (_, kind), number in gpu.kernels.items() if kind != "all_to_all_single")
        return {"kernels": kernels, "collectives": len(gpu.launches), "waits": sum(gpu.waits.values())}


def _time(call: Callable[[], Any]) -> list[float]:
    """Returns the CPU milliseconds of this thread in each call, without the time in collectives."""
    times, all_to_all, within = [], dist.all_to_all_single, 0.0

    def timed(*arguments: Any, **named: Any) -> Any:
        nonlocal within
        work, taken = time_call(partial(all_to_all, *arguments, **named), time.thread_time)
        within += taken
        return work

    with torch.no_grad(), mock.patch.object(dist, "all_to_all_single", timed):
        for _ in range(WARM_UP + EXCHANGES):
            dist.barrier()
            within = 0.0
            taken = time_ms(call, time.thread_time)
            times.append(taken - within)
    return times[WARM_UP:]


def _keyed(keys: int) -> KeyedJaggedTensor:
    lengths = np.random.default_rng((keys, dist.get_rank())).integers(0, 9, keys * ROWS)
    return KeyedJaggedTensor(
        [f"key {key}" for key in range(keys)],
        torch.arange(int(lengths.sum())),
        lengths=torch.from_numpy(lengths),
    )


def _dense_fields() -> dict[str, torch.Tensor]:
    return {f"field {number}": torch.arange(ROWS) + number for number in range(50)}


BATCHES: dict[str, Callable[[], Any]] = {
    "KeyedJaggedTensor of four keys, with labels": lambda: BaseBatch(_keyed(4), ROWS, {}, labels=_keyed(1)),
    "HSTU's batch": lambda: CASES["ranking"].make_batch(CASES["ranking"].samples(dist.get_rank(), ROWS)),
    "fifty dense fields": _dense_fields,
}


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    columns: dict[str, Any] = {
        "batch": "{batch}",
        "kernels": "{kernels}",
        "collectives": "{collectives}",
        "host waits": "{waits}",
        "CPU time of the thread, ms": "{cpu_ms[median]:.2f}",
    }
    return {"exchange-kernels counts": make_table(figures["batches"], columns)}
