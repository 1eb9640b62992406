"""Every function that partitions, called alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from commons.partition import (
    balance_micro_batches,
    balance_window,
    divide_into_micro_batches,
    karmarkar_karp,
    longest_processing_time,
    pack_micro_batches,
    rebalance,
    refine,
    refined,
)
from tests.commons.partition.checks import as_lists

Partition = list[np.ndarray]
NUM_STEPS = 3


def _as_loaded(workloads: Sequence) -> np.ndarray:
    return np.arange(len(workloads))


def _joined(groups: list[Partition]) -> Partition:
    return [part for group in groups for part in group]


def _tokens(workloads: Sequence) -> dict:
    return {"tokens": 1 + _as_loaded(workloads) % 5, "max_tokens": 9}


# From (workloads, number of parts, equal sizes) to as many parts, from scratch.
FROM_SCRATCH: dict[str, Callable[[Sequence, int, bool], Partition]] = {
    "karmarkar_karp": karmarkar_karp,
    "longest_processing_time": longest_processing_time,
    "longest_processing_time with caps": lambda workloads, parts, equal_size: longest_processing_time(
        workloads,
        parts,
        equal_size,
        tokens=_as_loaded(workloads) % 5,
        max_tokens=5 * len(workloads) // parts + 5,
    ),
    "refined": refined,
    "refine": lambda workloads, parts, equal_size: refine(
        workloads, np.array_split(_as_loaded(workloads), parts), equal_size=equal_size
    ),
}
# Also from where the samples are.
ONE_STEP = FROM_SCRATCH | {
    "rebalance": lambda workloads, parts, equal_size: rebalance(
        workloads, _as_loaded(workloads) % parts, parts, equal_size=equal_size
    ),
    "rebalance with costs": lambda workloads, parts, equal_size: rebalance(
        workloads,
        _as_loaded(workloads) % parts,
        parts,
        sizes=_as_loaded(workloads),
        ranks_per_node=2,
        equal_size=equal_size,
    ),
    "rebalance with a token tolerance": lambda workloads, parts, equal_size: rebalance(
        workloads,
        _as_loaded(workloads) % parts,
        parts,
        equal_size=equal_size,
        tokens=_as_loaded(workloads) % 5,
        token_tolerance=0.1,
    ),
    "refined with a token tolerance": lambda workloads, parts, equal_size: refined(
        workloads, parts, equal_size, tokens=_as_loaded(workloads) % 5, token_tolerance=0.1
    ),
    "rebalance with groups": lambda workloads, parts, equal_size: rebalance(
        workloads,
        _as_loaded(workloads) % parts,
        parts,
        groups=_as_loaded(workloads) % 7 - 3,
        equal_size=equal_size,
    ),
}
# Also to NUM_STEPS times as many parts.
WITH_WINDOWS = ONE_STEP | {
    "balance_window": lambda workloads, parts, equal_size: _joined(
        balance_window(workloads, parts, NUM_STEPS, equal_size=equal_size)
    ),
    "balance_window with a ratio": lambda workloads, parts, equal_size: _joined(
        balance_window(workloads, parts, NUM_STEPS, max_step_ratio=1.25, equal_size=equal_size)
    ),
}
# Also to any number of parts.
PARTITIONS = WITH_WINDOWS | {
    "pack_micro_batches": lambda workloads, parts, equal_size: pack_micro_batches(
        workloads, multiple_of=parts, **_tokens(workloads)
    ),
    "balance_micro_batches": lambda workloads, parts, equal_size: _joined(
        balance_micro_batches(workloads, num_partitions=parts, equal_size=equal_size, **_tokens(workloads))
    ),
    "divide_into_micro_batches": lambda workloads, parts, equal_size: _joined(
        divide_into_micro_batches(
            workloads, partition=np.array_split(_as_loaded(workloads), parts), **_tokens(workloads)
        )
    ),
}


def partition_with(name: str, workloads: Sequence, parts: int, equal_size: bool) -> list[list[int]]:
    return as_lists(PARTITIONS[name](workloads, parts, equal_size))


def partitions_with_ties() -> dict[str, list[list[int]]]:
    workloads = np.random.default_rng(1).integers(0, 40, 200)
    return {
        f"{name}, {equal_size=}": partition_with(name, workloads, 7, equal_size)
        for name in PARTITIONS
        for equal_size in (True, False)
    }
