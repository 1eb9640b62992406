"""Order of streams, lifetime of memory and waits of the host, on a recorded GPU.

What this shows is how the stage is programmed: which stream waits for which, how long memory lives, where the
host waits, and in which order ranks launch collectives. It does not show CUDA, NCCL, kernels or time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from benchmarks.exchange_kernels import BATCHES, count
from tests.process_pool import DEVICE_TYPE, ProcessPool
from tests.recorded_cuda.cases import CASES
from tests.recorded_cuda.mutants import MUTANTS
from tests.recorded_cuda.record import Record, record

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
    "own loop": {_READ: 4},
    "own loop, micro-batches": {_LOOKED_UP: 4, _READ: 8},
    "micro-batches": {_LOOKED_UP: 7},
    "prefetch, micro-batches": {_LOOKED_UP: 7},
    "micro-batches of HSTU": {_LOOKED_UP: 8},  # one per sharded module,
    "verification": {
        "commons/extensions/verification/verification.py _row_hashes copy to the host": 14,
        _READ: 7,
    },
    # One per step, 8 steps later, in the planning thread.
    "learned costs": {"commons/perf_model/compute_clock.py seconds Event.synchronize": 18},
    "ids received": {"commons/received_ids.py take tolist": 1},
    # In the planning thread, for what has ended.
    "votes": {"commons/training/step_vote.py read Event.synchronize": 6},
}
# The cases that find a fault. TorchRec's two pipelines use streams in their own ways.
FOUND_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(MUTANTS, ("native",)),
    **dict.fromkeys(
        (
            "data_dist does not wait for memcpy",
            "a batch is not recorded",
            "the exchange on the default stream",
            "the exchange on the default stream after the copy",
            "the exchange is not waited for",
        ),
        ("native", "prefetch"),
    ),
    "default does not wait at the step": ("native, labels first", "prefetch, labels first"),
    "a tensor is not recorded": ("dicts", "prefetch, dicts"),
    "a tensor of TorchRec's batch is not recorded": ("TorchRec's batches",),
    "streams of its own for evaluation": ("evaluation", "prefetch, evaluation"),
    "a fetch of pieces is not waited for": ("pieces",),
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


def waits_of_library(found: Record) -> Counter[str]:
    ours = ("commons/", "hstu/", "sid_gr/")
    return Counter({place: count for place, count in found.waits.items() if place.startswith(ours)})


@pytest.mark.parametrize("case", CASES)
def test_a_case_is_equal_to_the_cpu_and_clean(pool, case):
    of_ranks = pool.run(record, case)
    for found in of_ranks:
        assert not found.findings, "\n".join(found.findings)
        assert found.launches == of_ranks[0].launches
    if case == "forward of a batch as loaded":  # the model reads what a plan would have told
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
def test_a_fault_is_found(pool, mutant, case):
    of_ranks = pool.run(record, case, mutant, False)
    if mutant in WAITED_AT:
        assert all(found.waits[WAITED_AT[mutant]] for found in of_ranks)
    elif mutant == OTHER_ORDER:
        assert of_ranks[0].launches != of_ranks[1].launches
    else:
        assert any(found.findings for found in of_ranks), [found.error for found in of_ranks]
