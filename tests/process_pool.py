"""Pools of processes that live across tests, because importing TorchRec takes seconds."""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

# "cuda" for a GPU per process, and NCCL next to gloo; `make gpu-check` sets it.
DEVICE_TYPE = os.environ.get("TEST_DEVICE", "cpu")
# CUDA and NCCL have dozens of their own, and take longer to start.
_MAX_THREADS = 400 if DEVICE_TYPE == "cuda" else 40
_PATIENCE = 5 if DEVICE_TYPE == "cuda" else 1


# Processes have imported TorchRec when they start.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["tests.preload"])


def free_port() -> int:
    """Returns a TCP port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def rank_device() -> Any:
    """Returns the torch.device of this process in a pool."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if DEVICE_TYPE == "cuda" else torch.device("cpu")


class RankError(AssertionError):
    """Error of some ranks, with each rank's traceback; it is empty for a rank that did not fail."""

    def __init__(self, by_rank: list[str]) -> None:
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(by_rank) if text))
        self.by_rank = by_rank


class ProcessPool:
    """`num_ranks` processes in one process group that run functions together.

    A failure or a timeout ends the processes, and the next call starts new ones. So does a large number of
    groups, because each has threads that wake up a hundred times per second and slow everything else.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Calls `function(*args)` in every process and returns the results by rank, or raises a `RankError`.

        The function must be importable, its arguments and result picklable, and all within `timeout` seconds.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        answers = self._answers(timeout * _PATIENCE)
        if all(ok for ok, _ in answers):
            if self._most_threads() > _MAX_THREADS:
                self.close()
            return [result for _, result in answers]
        self.close(kill=True)
        raise RankError(["" if ok else text for ok, text in answers])

    def close(self, kill: bool = False) -> None:
        """Ends the processes."""
        for connection in self._connections:
            if not kill:
                connection.send(None)
        for process in self._processes:
            if kill:
                process.kill()
            process.join(10)
        self._processes, self._connections = [], []

    def _most_threads(self) -> int:
        return max(len(os.listdir(f"/proc/{process.pid}/task")) for process in self._processes)

    def _start(self) -> None:
        # CUDA cannot be used in a fork of a process that has asked for GPUs, as imports may.
        context = multiprocessing.get_context("spawn") if DEVICE_TYPE == "cuda" else forkserver
        port = free_port()
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.num_ranks, port), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _answers(self, timeout: float) -> list[tuple[bool, Any]]:
        deadline = time.monotonic() + timeout
        answers: dict[int, tuple[bool, Any]] = {}
        grace = None
        while len(answers) < self.num_ranks:
            pending = {c: r for r, c in enumerate(self._connections) if r not in answers}
            left = min(deadline, grace or deadline) - time.monotonic()
            ready = wait(list(pending), timeout=max(left, 0))
            if not ready:
                break
            for connection in ready:
                try:
                    answer = connection.recv()
                except EOFError:
                    answer = (False, "the process died")
                answers[pending[connection]] = answer
                if not answer[0] and grace is None:
                    grace = time.monotonic() + 5  # the others may hang in a collective
        return [answers.get(r, (False, f"no answer within {timeout} s")) for r in range(self.num_ranks)]


def _serve(connection: Connection, rank: int, num_ranks: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    from tests.poisoned_memory import poison_memory

    poison_memory()
    multiprocessing.current_process().daemon = False  # a daemon may not start a DataLoader's workers,
    multiprocessing.set_start_method("fork", force=True)  # which would import torch anew
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(num_ranks)
    )
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE_TYPE == "cuda" else "gloo")
    while (call := connection.recv()) is not None:
        function, args = call
        try:
            connection.send((True, function(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Python's normal exit sometimes aborts because of gloo's threads
