"""Karmarkar–Karp differencing for many parts.

Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning", 1982. A state is a partial
partition, one load per part in descending order. The two states that are worst balanced are merged, the
heaviest part of one with the lightest of the other, until one state is left.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import ArrayLike

from commons.partition.problem import indices_of_parts
from commons.partition.workloads import as_workloads, check_count


def karmarkar_karp(workloads: ArrayLike, num_partitions: int, equal_size: bool = True) -> list[np.ndarray]:
    """Partitions samples by differencing, so that the largest load is small.

    Args:
        workloads: `[samples]`, non-negative.
        num_partitions: parts, at least 1.
        equal_size: part sizes differ by at most one. Differencing then starts from groups of
            `num_partitions` samples of similar workload, and every part gets one of each group.

    Returns:
        For each part the ascending int64 indices of its samples. Ties are broken by index, so equal input
        gives equal output on every machine.

    Raises:
        ValueError: a workload is negative, NaN, or infinite, or `num_partitions` is below 1.
    """
    check_count("num_partitions", num_partitions)
    values = as_workloads(workloads)
    if len(values) == 0:
        return [np.empty(0, dtype=np.int64) for _ in range(num_partitions)]
    descending = np.argsort(-values, kind="stable")
    group = num_partitions if equal_size else 1
    groups = [descending[start : start + group] for start in range(0, len(values), group)]
    merges = _difference([values[samples] for samples in groups], num_partitions)
    slots = _slots_of_groups(merges, len(groups), num_partitions)
    part_of = np.empty(len(values), dtype=np.int64)
    for samples, group_slots in zip(groups, slots, strict=True):
        part_of[samples] = group_slots[: len(samples)]
    return indices_of_parts(part_of, num_partitions)


# A merge: the two states, and for each slot of the new state the slot of each state that went into it.
_Merge = tuple[int, int, np.ndarray, np.ndarray]


def _difference(states: list[np.ndarray], num_partitions: int) -> list[_Merge]:
    """Merges states until one is left. A state is its descending loads, without empty slots at the end.

    State i < len(states) is given; state len(states) + m is the result of merge m.
    """
    heap = [(-_spread(loads, num_partitions), state) for state, loads in enumerate(states)]
    heapq.heapify(heap)
    states = list(states)
    merges: list[_Merge] = []
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        loads, first_slots, second_slots = _merge(states[first], states[second], num_partitions)
        merges.append((first, second, first_slots, second_slots))
        heapq.heappush(heap, (-_spread(loads, num_partitions), len(states)))
        states.append(loads)
    return merges


def _spread(loads: np.ndarray, num_partitions: int) -> float:
    lightest = loads[-1] if len(loads) == num_partitions else 0.0
    return float(loads[0] - lightest)


def _merge(
    first: np.ndarray, second: np.ndarray, num_partitions: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Adds the loads of two states, heaviest to lightest, and sorts the sums in descending order."""
    size = min(len(first) + len(second), num_partitions)
    sums = np.zeros(size)
    sums[: len(first)] = first
    sums[size - len(second) :] += second[::-1]
    order = np.argsort(-sums, kind="stable")
    # Slot i of the new state is slot order[i] of the first and size − 1 − order[i] of the second.
    return sums[order], order, size - 1 - order


def _slots_of_groups(merges: list[_Merge], num_groups: int, num_partitions: int) -> list[np.ndarray]:
    """For each given state, the part that each of its slots ended up in, by undoing the merges."""
    parts = {num_groups + len(merges) - 1: np.arange(num_partitions)}
    for merged in range(len(merges) - 1, -1, -1):
        first, second, first_slots, second_slots = merges[merged]
        of_merged = parts.pop(num_groups + merged)
        for state, slots in ((first, first_slots), (second, second_slots)):
            of_state = np.empty(num_partitions, dtype=np.int64)
            of_state[slots] = of_merged[: len(slots)]
            parts[state] = of_state
    return [parts[group] for group in range(num_groups)]
