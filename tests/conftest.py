# ruff: noqa: E402
import fcntl
import gc
import os
from collections.abc import Iterator
from typing import Protocol

# On some processors, MKL's sums depend on the alignment of memory, and tests compare bit for bit.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
gc.disable()  # collections take a third of the time that imports do

import pytest
import torch
from hypothesis import settings

from tests.compiled import compile_kernels
from tests.poisoned_memory import poison_memory
from tests.process_pool import DEVICE_TYPE, ProcessPool

# Without deadlines, because machines are shared.
settings.register_profile("every run", max_examples=40, deadline=None)
settings.register_profile("fast", max_examples=8, deadline=None)  # make test-fast
settings.register_profile("random", max_examples=500, deadline=None)  # make test-random
settings.load_profile("every run")
poison_memory()


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported, which each collection would look through
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extension modules would report frozen objects as leaks


class Pools(Protocol):
    def __call__(self, num_ranks: int) -> ProcessPool: ...


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compiles the kernels in one xdist worker, so that all other processes find them in the cache."""
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_kernels()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Returns `pools`, where `pools(n)` is n processes shared by all tests of the session."""
    made: dict[int, ProcessPool] = {}

    def pool(num_ranks: int) -> ProcessPool:
        if DEVICE_TYPE == "cuda" and num_ranks > torch.cuda.device_count():
            pytest.skip(f"needs {num_ranks} GPUs")
        return made.setdefault(num_ranks, ProcessPool(num_ranks))

    yield pool
    for pool_of_size in made.values():
        pool_of_size.close()
