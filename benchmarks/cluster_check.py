"""Whether many processes plan, exchange and unshuffle without loss, and all end when one of them dies.

Three runs of gloo processes on this machine: one over all steps, with loaders of different lengths; one in
which a process is killed while it plans; and one in which a process is killed in the exchange.
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import gc
import json
import logging
import multiprocessing
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

from commons.distributed import BatchShuffler
from commons.distributed.exchange import Exchange
from commons.distributed.placement import warm_up

PROCESSES, STEPS = 64, 200
ROWS = 8
DIES_AT = 10  # step
MOST_SECONDS, MOST_BYTES = 300, 20e9
DESCRIPTORS, DESCRIPTORS_PER_RANK = 44, 4  # 300 for 64 processes
# After the longest of these, an end counts as a hang. The job's timeout would end it, too, but later.
DEADLINE_S, TIMEOUT = 60.0, timedelta(minutes=5)
DIES = ("", "planning", "exchange")


class _Shuffler(BatchShuffler):
    def get_workloads(self, batch: Any) -> torch.Tensor:
        return batch["ids"].lengths() ** 2


def main() -> None:
    """Prints a line for each run; exits with 1 if something was lost or hung."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_check", description=__doc__)
    parser.add_argument("processes", type=int, nargs="?", default=PROCESSES)
    parser.add_argument("steps", type=int, nargs="?", default=STEPS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warm_up(_Shuffler().settings)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy what forks share
    failed = [what for dies in DIES for what in _run(given.processes, given.steps, dies)]
    gc.unfreeze()  # else extensions report what is frozen as leaks
    print("\n".join(failed) or "nothing was lost, and all processes ended")
    sys.exit(bool(failed))


def _run(processes: int, steps: int, dies: str) -> list[str]:
    """Runs all processes, prints what they found, and returns what went wrong."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=_rank, args=(rank, processes, steps, dies, Path(folder)))
            for rank in range(processes)
        ]
        for process in ranks:
            process.start()
        memory, died_at = 0, float("nan")
        while any(process.is_alive() for process in ranks):
            if not dies:
                memory = max(memory, sum(_own_memory(process.pid) for process in ranks))
                time.sleep(0.5)
            elif ranks[_dying(processes)].is_alive():
                ranks[_dying(processes)].join(0.5)
            else:
                died_at = time.perf_counter() if died_at != died_at else died_at
                if time.perf_counter() - died_at > DEADLINE_S:
                    break
                time.sleep(0.02)
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        was_killed = ranks[_dying(processes)].exitcode == -signal.SIGKILL
        for process in ranks:
            process.kill()
            process.join()
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    seconds = time.perf_counter() - start
    what = f"{processes} processes, " + (f"one killed in {dies}" if dies else f"{steps} steps")
    if dies:
        print(f"{what}: the last one ended {start + seconds - died_at:.1f} s later, {seconds:.0f} s in all")
        errors = [f"{what}: rank {rank} still ran {DEADLINE_S:.0f} s later" for rank in hung]
        return errors if was_killed else [*errors, f"{what}: it was not killed"]
    errors = [f"{what}: {of_rank['error']}" for of_rank in found if of_rank["error"]]
    if len(found) < processes:
        errors.append(f"{what}: {processes - len(found)} processes gave no result")
    if seconds > MOST_SECONDS or memory > MOST_BYTES:
        errors.append(f"{what}: it took {seconds:.0f} s and {memory / 1e9:.1f} GB")
    if found:
        most = {
            name: max(of_rank[name] for of_rank in found) for name in ("descriptors", "threads", "groups")
        }
        print(
            f"{what}: {seconds:.0f} s, {memory / 1e9:.1f} GB private memory in total; at most "
            f"{most['groups']} groups, {most['descriptors']} descriptors and {most['threads']} threads each"
        )
        if most["descriptors"] > DESCRIPTORS + DESCRIPTORS_PER_RANK * processes:
            errors.append(f"{what}: a process has {most['descriptors']} descriptors")
    return errors


def _dying(processes: int) -> int:
    """The rank that is killed."""
    return processes // 2


def _rank(rank: int, processes: int, steps: int, dies: str, folder: Path) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # those of the first process, to the others
    if dies:  # its errors are expected, on all ranks
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes, timeout=TIMEOUT)
    error = ""
    try:
        error = _steps(rank, processes, steps, dies)
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
        dist.barrier()  # a gloo process that ends while others talk to it ends them
    os._exit(bool(error))


def _steps(rank: int, processes: int, steps: int, dies: str) -> str:
    """Runs all steps; returns what was lost or doubled, over all ranks, or came back wrong."""
    shuffler = _Shuffler()
    if rank == _dying(processes) and dies:
        _die_in(shuffler, dies)
    held = np.zeros(3, dtype=np.int64)  # samples, sum of their numbers, and of their squares mod a prime
    placed = np.zeros_like(held)
    for step, (batch, plan) in enumerate(shuffler.plan_ahead(_loader(rank, steps, held))):
        mine = shuffler.exchange(batch, plan)
        numbers = mine["number"][: int(plan.num_placed[rank])]
        placed += _sums(numbers)
        if not bool((mine["ids"].lengths()[: len(numbers)] == numbers % 37).all()):
            return f"rank {rank}, step {step}: a sample has the ids of another"
        back = shuffler.unshuffle(numbers, plan)
        real = int(plan.num_loaded[rank])
        if not torch.equal(back[:real], batch["number"][:real]):
            return f"rank {rank}, step {step}: unshuffle returned another sample's result"
    of_all = shuffler.group.channel().all_gather(np.concatenate([held, placed])).sum(0)
    return (
        "" if np.array_equal(of_all[:3], of_all[3:]) else f"samples were lost or doubled: {of_all.tolist()}"
    )


def _loader(rank: int, steps: int, held: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yields batches of numbered samples; loaders end at different steps, a few at once."""
    own = {0: steps, 1: 0}.get(rank, steps - (rank * 7) % (steps // 2))
    for step in range(own):
        numbers = torch.arange(ROWS) + ROWS * (step + steps * rank)
        lengths = numbers % 37
        values = torch.arange(int(lengths.sum()))
        held += _sums(numbers)
        yield {"number": numbers, "ids": KeyedJaggedTensor(["item"], values, lengths=lengths)}


def _sums(numbers: torch.Tensor) -> np.ndarray:
    return np.array([len(numbers), int(numbers.sum()), int((numbers**2 % 1_000_003).sum())])


def _die_in(shuffler: BatchShuffler, where: str) -> None:
    """Has this process killed in a later step, in the thread that plans or within an exchange."""
    calls = {"planning": 0, "exchange": 0}

    def die(*_: Any) -> None:
        calls[where] += 1
        if calls[where] == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    if where == "planning":
        plan = shuffler.planner.plan

        def planned(*arguments: Any) -> Any:
            die()
            return plan(*arguments)

        shuffler.planner.plan = planned  # type: ignore[method-assign]
    else:
        exchange = shuffler._exchange

        def move(*arguments: Any) -> Any:
            die()
            return exchange.move(*arguments)

        shuffler._exchange = Exchange(move, exchange.traffic)


def _own_memory(pid: int | None) -> int:
    """Bytes that a process does not share with others; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


if __name__ == "__main__":
    main()
