"""Entry points run as under torchrun, without its start: by processes forked from one that knows TorchRec."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

from tests.e2e.torchrun import ENVIRONMENT, REPOSITORY


def forked_ranks(directory: Path, *arguments: str | Path, ranks: int = 2, timeout: float = 120.0) -> str:
    """Output of `torchrun --nproc_per_node RANKS ARGUMENTS` in `directory`, of a run that succeeds.

    A run that is to fail takes torchrun, which ends its other ranks and shows the first cause.

    Raises:
        AssertionError: a rank fails, or does not end in time; the message has its output.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.NamedTemporaryFile("r") as output:
        processes = [
            context.Process(
                target=_run, args=(str(directory), [*map(str, arguments)], rank, ranks, port, output.name)
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        running = list(processes)
        while running and time.monotonic() < deadline:
            wait([process.sentinel for process in running], timeout=deadline - time.monotonic())
            running = [process for process in running if process.is_alive()]
            if any(process.exitcode for process in processes):
                break
        for process in running:
            process.kill()
        for process in processes:
            process.join()
        text = output.read()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * ranks, f"exit codes {codes}\n{text}"
    return text


def _run(directory: str, arguments: list[str], rank: int, ranks: int, port: int, output: str) -> None:
    import torch

    torch.set_num_threads(1)
    os.chdir(directory)
    os.environ.update(ENVIRONMENT)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    for name, value in (("RANK", rank), ("WORLD_SIZE", ranks)):
        os.environ.update({name: str(value), f"LOCAL_{name}": str(value)})
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    sys.path[:0] = ["", str(REPOSITORY)]
    is_module, (name, *rest) = arguments[0] == "-m", arguments[arguments[0] == "-m" :]
    sys.argv = [name, *rest]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")
