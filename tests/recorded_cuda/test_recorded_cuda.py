"""Order of streams, lifetime of memory and waits of the host, on a recorded GPU.

What this shows is how the stage is programmed: which stream waits for which, how long memory lives, where the
host waits, and in which order ranks launch collectives. It does not show CUDA, NCCL, kernels or time.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch

from benchmarks.exchange_kernels import BATCHES, count
from tests.commons.distributed.loaded_batches import check_identical
from tests.process_pool import DEVICE_TYPE, ProcessPool
from tests.recorded_cuda import modes
from tests.recorded_cuda.cases import CASES, OTHERS, Place
from tests.recorded_cuda.mutants import MUTANTS

pytestmark = [
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13."), reason="follows the insides of torch 2.13, which is pinned"
    ),
    pytest.mark.skipif(DEVICE_TYPE == "cuda", reason="there is a GPU"),
]

_LOOKED_UP = "commons/extensions/micro_batches/looked_up.py __init__ tolist"
_READ = "commons/sequence_batch/packed_rows.py read_together copy to the host"
# Waits of the library on rank 0, in all steps of a case; every other case has none.
WAITS = {
    "own loop": {_LOOKED_UP: 3, _READ: 6},
    # One per sharded module and step.
    **{case: {_LOOKED_UP: 8} for case in CASES if case.endswith("micro-batches")},
    "verification": {
        "commons/extensions/verification/verification.py _row_hashes copy to the host": 12,
        _READ: 6,
    },
    # One per step, 8 steps later, in the planning thread.
    "learned costs": {"commons/perf_model/compute_clock.py seconds Event.synchronize": 15},
    "votes": {
        "commons/training/step_vote.py read Event.synchronize": 6,  # in the planning thread, of ended steps
    },
}
# The cases that find a fault. TorchRec's two pipelines use streams in their own ways.
FOUND_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(MUTANTS, ("native",)),
    "default does not wait at the step": ("native", "prefetch"),
    "a batch is not recorded": ("native", "prefetch"),
    "the exchange on the default stream": ("native", "prefetch"),
    "a tensor is not recorded": ("dicts",),
    "a shared tensor is not recorded": ("dicts",),
    "a tensor of TorchRec's batch is not recorded": ("TorchRec's batches",),
    "streams of its own for evaluation": ("evaluation", "prefetch, evaluation"),
    "a fetch of pieces is not waited for": ("pieces",),
    "no event after the exchange": ("semi_sync",),
    "a lookup stream of its own": ("fused",),
    "a vote is read early": ("votes",),
    "times are read early": ("learned costs",),
}
# Faults that only the number of waits shows, or only the order of launches.
WAITED_AT = {
    "indices in pageable memory": "commons/sequence_batch/packed_rows.py _locate copy from pageable memory",
    "a size is read": "commons/distributed/exchange.py transfer aten::_local_scalar_dense",
}
OTHER_ORDER = "a rank skips an exchange"


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    """Two processes of their own: streams and groups of a recorded GPU stay in them."""
    made = ProcessPool(2)
    yield made
    made.close()


class Record(NamedTuple):
    """Events of a case on one rank: as of `clocks.Device`, and the error that it raised, if any."""

    findings: Counter[str]
    waits: Counter[str]
    launches: list[tuple[str, str]]
    error: str


def record(case: str, mutant: str = "") -> Record:
    """Runs a case on this rank with a fault put in, or with none and the results of the CPU, to the bit."""
    os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    expected = None if mutant else CASES[case](Place(on_cuda=False))
    error = ""
    with modes.recorded_cuda() as gpu, MUTANTS[mutant]() if mutant else nullcontext():
        try:
            results = CASES[case](Place(on_cuda=True))
        except Exception as raised:
            if not mutant:
                raise
            error = repr(raised)
        found = Record(Counter(gpu.findings), Counter(gpu.waits), list(gpu.launches), error)
    if not mutant:
        check_identical(results, expected, case)
    return found


def faults(found: Record) -> set[str]:
    """Returns the findings without numbers of streams, and, of freed memory, without who gets it next."""
    numbered = (re.sub(r"stream \d+", "a stream", finding) for finding in found.findings)
    return {re.sub(r"^.*: memory of", "memory of", finding) for finding in numbered}


@pytest.fixture(scope="module")
def recorded(pool) -> Callable[[str], list[Record]]:
    """The records of a case without a fault, which runs once."""
    return functools.cache(functools.partial(pool.run, record))


@pytest.fixture(scope="module")
def races(recorded) -> Callable[[str], set[str]]:
    """The faults that TorchRec alone has in the pipeline of a case, which are not the stage's."""

    def of_case(case: str) -> set[str]:
        kind = case.partition(",")[0]
        return set().union(*map(faults, recorded(f"{kind}, TorchRec alone"))) if kind in OTHERS else set()

    return of_case


def waits_of_library(found: Record) -> Counter[str]:
    ours = ("commons/", "hstu/", "sid_gr/")
    return Counter({place: count for place, count in found.waits.items() if place.startswith(ours)})


@pytest.mark.parametrize("case", CASES)
def test_a_case_is_equal_to_the_cpu_and_clean(recorded, races, case):
    of_ranks = recorded(case)
    for found in of_ranks:
        assert not faults(found) - races(case), "\n".join(found.findings)
        assert found.launches == of_ranks[0].launches
    # The model reads what a plan would have told.
    if case == "forward of a batch as loaded" or case.endswith("TorchRec alone"):
        assert waits_of_library(of_ranks[0])
    else:
        assert waits_of_library(of_ranks[0]) == Counter(WAITS.get(case, {}))


@pytest.mark.parametrize(("batch", "kernels"), [*zip(BATCHES, (17, 22, 7), strict=True)])
def test_an_exchange_launches_so_many_kernels_and_waits_for_nothing(pool, batch, kernels):
    expected = {"kernels": kernels, "collectives": 1, "waits": 0}
    assert pool.run(count, batch) == [expected] * 2


@pytest.mark.parametrize(
    ("mutant", "case"), [(mutant, case) for mutant, found_by in FOUND_BY.items() for case in found_by]
)
def test_a_fault_is_found(pool, races, mutant, case):
    of_ranks = pool.run(record, case, mutant)
    if mutant in WAITED_AT:
        assert all(found.waits[WAITED_AT[mutant]] for found in of_ranks)
    elif mutant == OTHER_ORDER:
        assert of_ranks[0].launches != of_ranks[1].launches
    else:
        of_it = [faults(found) - races(case) for found in of_ranks]
        assert any(of_it), [found.error for found in of_ranks]
