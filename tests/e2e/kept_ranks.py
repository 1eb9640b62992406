"""Runs entry points in kept processes, which costs a tenth of a torchrun and shows the same training.

Processes are kept for each model, because the names in a gin file are those of one model's package.
"""

import contextlib
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gin
import pytest
import torch

from commons.training import entry_point, run_log
from tests.process_pool import ProcessPool


class KeptRanks:
    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], ProcessPool] = {}

    def run(self, model: str, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns each rank's result of a function, in processes that import one model only."""
        return self._pools.setdefault((model, ranks), ProcessPool(ranks)).run(function, *args)

    def train(self, directory: Path, *arguments: str | Path, ranks: int = 2) -> str:
        """Returns what `torchrun --nproc_per_node RANKS ARGUMENTS` prints, where these begin with "-m"."""
        _, module, *rest = map(str, arguments)
        return "".join(self.run(model_of(module), ranks, run_entry_point, str(directory), module, rest))

    def refuse(self, directory: Path, *arguments: str | Path) -> str:
        """Returns what an entry point prints that has to fail, on one rank."""
        _, module, *rest = map(str, arguments)
        [output] = self.run(model_of(module), 1, run_entry_point, str(directory), module, rest, True)
        return output

    def close(self) -> None:
        """Ends all processes."""
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def kept_ranks() -> Iterator[KeptRanks]:
    """Returns kept processes that end with the test's module."""
    kept = KeptRanks()
    yield kept
    kept.close()


def model_of(module: str) -> str:
    """Returns the package of a model's module."""
    return module.partition(".")[0]


def run_entry_point(directory: str, module: str, arguments: list[str], fails: bool = False) -> str:
    """Runs an entry point in the pool's process group; returns what it prints, or its error if it `fails`."""

    @contextlib.contextmanager
    def group_of_pool() -> Iterator[torch.device]:
        yield torch.device("cpu")

    run_log._warned.clear()  # each run names what has no effect
    with (
        working_in(directory),
        mock.patch.object(sys, "argv", [module, *arguments]),
        mock.patch.object(entry_point, "rank_process", group_of_pool),
        _output() as printed,
    ):
        try:
            importlib.import_module(module).main()
        except Exception:
            if not fails:
                raise
            print(traceback.format_exc())
        else:
            assert not fails, "the run succeeded"
    return printed()


@contextlib.contextmanager
def working_in(directory: str) -> Iterator[None]:
    """While active, this process works and imports in a folder, as one does that was started there."""
    gin.clear_config()
    with contextlib.chdir(directory), mock.patch.object(sys, "path", [directory, *sys.path]):
        yield


@contextlib.contextmanager
def _output() -> Iterator[Callable[[], str]]:
    """While active, this process writes to a file, whose text is returned later."""
    text = ""
    with tempfile.TemporaryFile("w+") as file, contextlib.ExitStack() as restored:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            kept = os.dup(number)
            restored.callback(os.close, kept)
            restored.callback(os.dup2, kept, number)
            restored.callback(stream.flush)
            os.dup2(file.fileno(), number)
        try:
            yield lambda: text
        finally:
            restored.close()
            file.seek(0)
            text = file.read()
