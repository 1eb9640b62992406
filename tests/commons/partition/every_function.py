"""Every function that partitions, called alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from commons.partition import (
    balance_window,
    karmarkar_karp,
    longest_processing_time,
    rebalance,
    refine,
    refined,
)
from tests.commons.partition.checks import as_lists

Partitions = list[list[int]]


def _as_loaded(workloads: list) -> np.ndarray:
    return np.arange(len(workloads))


# For (workloads, number of parts, equal sizes) the parts.
PARTITIONS: dict[str, Callable[[list, int, bool], list[np.ndarray]]] = {
    "karmarkar_karp": karmarkar_karp,
    "longest_processing_time": longest_processing_time,
    "refined": refined,
    "refine": lambda workloads, parts, equal_size: refine(
        workloads, np.array_split(_as_loaded(workloads), parts), equal_size=equal_size
    ),
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
    "balance_window": lambda workloads, parts, equal_size: [
        part for step in balance_window(workloads, parts, 3) for part in step
    ],
    "balance_window with a ratio": lambda workloads, parts, equal_size: [
        part for step in balance_window(workloads, parts, 3, max_step_ratio=1.25) for part in step
    ],
    "longest_processing_time with caps": lambda workloads, parts, equal_size: longest_processing_time(
        workloads,
        parts,
        equal_size,
        max_rows=len(workloads),
        tokens=_as_loaded(workloads) % 5,
        max_tokens=5 * len(workloads) // parts + 5,
    ),
}


def partition_with(name: str, workloads: list, parts: int, equal_size: bool) -> Partitions:
    return as_lists(PARTITIONS[name](workloads, parts, equal_size))
