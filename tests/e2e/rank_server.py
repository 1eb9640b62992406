"""Forks interpreters from a process that has imported TorchRec, because that import takes seconds."""

import atexit
import functools
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from multiprocessing.connection import wait
from pathlib import Path

from tests.process_pool import forkserver

_fork = multiprocessing.get_context("fork")


@functools.cache
def forked_python() -> tuple[str, ...]:
    """Returns a command that stands in for `python`, passes signals on, and ends as the fork does."""
    name = f"rank-server-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        server = forkserver.Process(target=_serve, args=(listener,))
        server.start()
    atexit.register(server.terminate)  # runs before multiprocessing waits for its processes
    return (sys.executable, "-I", "-S", str(Path(__file__).with_name("rank_client.py")), name)


def _serve(listener: socket.socket) -> None:
    tests = multiprocessing.parent_process()
    assert tests is not None
    while tests.sentinel not in wait([listener, tests.sentinel]):
        client, _ = listener.accept()
        with client:
            _fork.Process(target=_answer, args=(client,)).start()


def _answer(client: socket.socket) -> None:
    """Runs what a client asks for, and ends when that ends."""
    size, [output], _, _ = socket.recv_fds(client, 4, 1)
    request = json.loads(client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    process = _fork.Process(target=_run, args=(*request, output))
    process.start()
    os.close(output)
    while process.sentinel not in wait([client, process.sentinel]):
        number = client.recv(1)
        os.kill(process.pid, number[0] if number else signal.SIGKILL)
    process.join()
    client.sendall(process.exitcode.to_bytes(2, "big", signed=True))


def _run(directory: str, arguments: list[str], environment: dict[str, str], output: int) -> None:
    import torch

    torch.set_num_threads(1)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for standard in (1, 2):
        os.dup2(output, standard)
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    sys.path[:0] = [directory if is_module else str(Path(arguments[0]).parent), environment["PYTHONPATH"]]
    try:
        if is_module:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # as an interpreter does; multiprocessing prints tracebacks by itself
        sys.exit(1)
