from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pytest
from hypothesis import settings

from commons.distributed.placement import warm_up
from commons.distributed.shuffler_settings import ShufflerSettings
from tests.process_pool import ProcessPool

settings.register_profile("no deadlines", deadline=None)  # machines are shared
settings.load_profile("no deadlines")


class Pools(Protocol):
    def __call__(self, num_ranks: int) -> ProcessPool: ...


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools(n)`: n gloo processes, shared by all tests of the session."""
    # Compiled here once, where no time-out runs, rather than by all processes at the same time.
    warm_up(ShufflerSettings(max_tokens_per_micro_batch=1))
    made: dict[int, ProcessPool] = {}

    def pool(num_ranks: int) -> ProcessPool:
        return made.setdefault(num_ranks, ProcessPool(num_ranks))

    yield pool
    for pool_of_size in made.values():
        pool_of_size.close()
