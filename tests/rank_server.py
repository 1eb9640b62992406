"""Forks interpreters from a process that has imported TorchRec, because that import takes seconds."""

import atexit
import ctypes
import functools
import gc
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


def forked_python(fresh: bool = False) -> tuple[str, ...]:
    """Returns a command that stands in for `python`, passes signals on, and ends as the fork does.

    With `fresh`, forks have imported nothing of this repository, and end as interpreters do, which may abort.
    """
    _start_server()
    client = str(Path(__file__).with_name("rank_client.py"))
    return (sys.executable, "-I", "-S", client, _name_of_server(os.getpid(), fresh))


@functools.cache
def _start_server() -> None:
    """Starts the server of this process. That of fresh forks then runs, too: `tests.preload` starts it."""
    with _listening(os.getpid(), fresh=False) as listener:
        server = forkserver.Process(target=_serve, args=(listener, os.getpid(), False))
        server.start()
    atexit.register(server.terminate)  # runs before multiprocessing waits for its processes


def serve_fresh_forks() -> None:
    """Forks the server of fresh forks from the forkserver, which has imported third-party packages alone."""
    tests = os.getppid()
    with _listening(tests, fresh=True) as listener:
        _fork.Process(target=_serve, args=(listener, tests, True)).start()


def _name_of_server(tests: int, fresh: bool) -> str:
    return f"{'fresh-' if fresh else ''}rank-server-{tests}"


def _listening(tests: int, fresh: bool) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + _name_of_server(tests, fresh))
    listener.listen()
    return listener


def _serve(listener: socket.socket, tests: int, fresh: bool) -> None:
    alive = os.pidfd_open(tests)
    while alive not in wait([listener, alive]):
        client, _ = listener.accept()
        with client:
            _fork.Process(target=_answer, args=(client, fresh)).start()


def _answer(client: socket.socket, fresh: bool) -> None:
    """Runs what a client asks for, and ends when that ends."""
    size, outputs, _, _ = socket.recv_fds(client, 4, 2)
    request = json.loads(client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    process = _fork.Process(target=_run, args=(*request, outputs, fresh))
    process.start()
    for output in outputs:
        os.close(output)
    while process.sentinel not in wait([client, process.sentinel]):
        number = client.recv(1)
        os.kill(process.pid, number[0] if number else signal.SIGKILL)
    process.join()
    client.sendall(process.exitcode.to_bytes(2, "big", signed=True))


def _run(
    directory: str, arguments: list[str], environment: dict[str, str], outputs: list[int], fresh: bool
) -> None:
    import torch

    gc.enable()
    torch.set_num_threads(1)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for standard, output in enumerate(outputs, 1):
        os.dup2(output, standard)
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    sys.path[:0] = [directory if is_module else str(Path(arguments[0]).parent)]
    sys.path[1:1] = filter(None, [environment.get("PYTHONPATH")])
    try:
        if is_module:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except Exception:
        sys.excepthook(*sys.exc_info())  # as an interpreter does; multiprocessing prints tracebacks by itself
        code = 1
    if fresh:
        ctypes.pythonapi.Py_Exit(code)  # finalizes the interpreter, and unloads libraries
    sys.exit(code)
