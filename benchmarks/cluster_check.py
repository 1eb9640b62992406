"""Checks that many processes plan, exchange, and unshuffle without loss, and that all end when one dies.

Runs gloo processes on this machine three times. The first run takes all steps, with loaders of different
lengths. In the second run, a process is killed while it plans, and in the third, in the exchange.
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import gc
import itertools
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import start_forks
from commons.distributed import BatchShuffler
from commons.distributed.placement import warm_up
from commons.extensions.unshuffle import Unshuffle

PROCESSES, STEPS = 64, 200
ROWS = 8
DIES_AT = 10  # step in which a process is killed
MOST_SECONDS = 300
DESCRIPTORS, DESCRIPTORS_PER_RANK = 44, 4  # 300 for 64 processes
# A process that still runs after the deadline counts as hung. The job's timeout would also end it, but later.
DEADLINE_S, TIMEOUT = 60.0, timedelta(minutes=5)


class _Shuffler(BatchShuffler):
    def get_workloads(self, batch: Any) -> torch.Tensor:
        return batch["ids"].lengths() ** 2


def main() -> None:
    """Prints a line for each run. Exits with 1 if samples were lost, or a run failed or hung."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_check", description=__doc__)
    parser.add_argument("processes", type=int, nargs="?", default=PROCESSES)
    parser.add_argument("steps", type=int, nargs="?", default=STEPS)
    given = parser.parse_args()
    if given.steps <= DIES_AT:
        parser.error(f"steps = {given.steps}: expected more than {DIES_AT}, in which a process is killed")
    torch.set_num_threads(1)
    warm_up(_Shuffler().settings)
    gc.collect()
    gc.freeze()  # garbage collection in a fork would copy memory that forks share
    failed = _check_steps(given.processes, given.steps)
    for dies in ("planning", "exchange"):
        failed += _check_death(given.processes, given.steps, dies)
    gc.unfreeze()  # otherwise, extension modules report frozen objects as leaks
    print("\n".join(failed) or "nothing was lost, and all processes ended")
    sys.exit(bool(failed))


def _check_steps(processes: int, steps: int) -> list[str]:
    """Runs all steps, prints the resources that the processes used, and returns the errors."""
    what, start = f"{processes} processes, {steps} steps", time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_forks(processes, _run_rank, processes, steps, "", Path(folder))
        for process in ranks:
            process.join()
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    seconds = time.perf_counter() - start
    errors = [f"{what}: {each['error']}" for each in found if each["error"]]
    if len(found) < processes:
        errors.append(f"{what}: {processes - len(found)} processes gave no result")
    if seconds > MOST_SECONDS:
        errors.append(f"{what}: it took {seconds:.0f} s")
    groups, descriptors, threads = (
        max((each[name] for each in found), default=0) for name in ("groups", "descriptors", "threads")
    )
    most = f"{groups} groups, {descriptors} descriptors and {threads} threads"
    print(f"{what}: {seconds:.0f} s; at most {most} each")
    if descriptors > DESCRIPTORS + DESCRIPTORS_PER_RANK * processes:
        errors.append(f"{what}: a process has {descriptors} descriptors")
    return errors


def _check_death(processes: int, steps: int, dies: str) -> list[str]:
    """Lets a process die, prints the time until the others ended, and returns the errors."""
    what, start = f"{processes} processes, one killed in {dies}", time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_forks(processes, _run_rank, processes, steps, dies, Path(folder))
        dying = ranks[processes // 2]
        dying.join()
        died_at = time.perf_counter()
        for process in ranks:
            process.join(max(died_at + DEADLINE_S - time.perf_counter(), 0))
        ended_at = time.perf_counter()
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
    print(f"{what}: the last one ended {ended_at - died_at:.1f} s later, {ended_at - start:.0f} s in all")
    errors = [f"{what}: rank {rank} still ran {DEADLINE_S:.0f} s later" for rank in hung]
    if dying.exitcode != -signal.SIGKILL:
        errors.append(f"{what}: it was not killed")
    return errors


def _run_rank(rank: int, processes: int, steps: int, dies: str, folder: Path) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # descriptors that the first process holds for other forks
    if dies:  # errors are expected on all ranks
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes, timeout=TIMEOUT)
    error = ""
    try:
        error = _run_steps(rank, processes, steps, dies)
        if not dies:
            dist.barrier()
    except Exception as raised:
        error = f"rank {rank}: {type(raised).__name__}: {raised}"
    figures = {
        "error": error,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }
    (folder / f"{rank}.json").write_text(json.dumps(figures))
    if not (dies or error):
        dist.barrier()  # a gloo process that exits during communication also ends its peers
    os._exit(bool(error))


def _run_steps(rank: int, processes: int, steps: int, dies: str) -> str:
    """Runs all steps. Returns "", or an error if any rank lost, doubled, or confused samples."""
    unshuffle = Unshuffle()
    shuffler = _Shuffler(extensions=[unshuffle])
    if dies and rank == processes // 2:
        _die_in(shuffler, dies)
    held = np.zeros(3, dtype=np.int64)  # samples, sum of their numbers, sum of squares mod a prime
    placed = np.zeros_like(held)
    for step, (batch, plan) in enumerate(shuffler.plan_ahead(_load(rank, steps, held))):
        mine = shuffler.exchange(batch, plan)
        numbers = mine["number"][: int(plan.num_placed[rank])]
        placed += _sum_up(numbers)
        if not bool((mine["ids"].lengths()[: len(numbers)] == numbers % 37).all()):
            return f"rank {rank}, step {step}: a sample has the ids of another"
        back = unshuffle.unshuffle(numbers, plan)
        real = int(plan.rows.num_loaded[rank])
        if not torch.equal(back[:real], batch["number"][:real]):
            return f"rank {rank}, step {step}: unshuffle returned another sample's result"
    sums = shuffler.group.channel().all_gather(np.concatenate([held, placed])).sum(0)
    return "" if np.array_equal(sums[:3], sums[3:]) else f"samples were lost or doubled: {sums.tolist()}"


def _load(rank: int, steps: int, held: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yields batches of numbered samples. Loaders end at different steps, and some at the same step."""
    own = {0: steps, 1: 0}.get(rank, steps - (rank * 7) % (steps // 2))
    for step in range(own):
        numbers = torch.arange(ROWS) + ROWS * (step + steps * rank)
        lengths = numbers % 37
        values = torch.arange(int(lengths.sum()))
        held += _sum_up(numbers)
        yield {"number": numbers, "ids": KeyedJaggedTensor(["item"], values, lengths=lengths)}


def _sum_up(numbers: torch.Tensor) -> np.ndarray:
    return np.array([len(numbers), int(numbers.sum()), int((numbers**2 % 1_000_003).sum())])


def _die_in(shuffler: BatchShuffler, where: str) -> None:
    """Makes this process kill itself at step `DIES_AT`, on the planning thread or in an exchange."""
    calls = itertools.count(1)
    of, name = (shuffler.planner, "plan") if where == "planning" else (shuffler, "_move")
    function = getattr(of, name)

    def call(*arguments: Any) -> Any:
        if next(calls) == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    setattr(of, name, call)


if __name__ == "__main__":
    main()
