"""Longest processing time first: the greedy placement that the search starts from."""

from __future__ import annotations

import numpy as np

from commons.partition.compiled import compiled
from commons.partition.parts import NONE, Limits


@compiled
def place_longest_first(work: np.ndarray, tokens: np.ndarray, base: np.ndarray, limits: Limits) -> np.ndarray:
    """Each sample, the heaviest first, to the lightest part that can take it.

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969. `base` int64 `[parts]` is what each
    part has before; `work` and `tokens` are int64 `[samples]`, `work` descending.

    Of equally light parts the one with fewer samples is lighter: what costs nothing is spread, too.

    Returns:
        int64 `[samples]`, the part of each; NONE from the first sample on that no part can take.
    """
    num_parts = len(base)
    fewest, most, max_tokens = limits.fewest, limits.most, limits.max_tokens
    part_of = np.full(len(work), NONE, dtype=np.int64)
    # A heap of the parts that can take more, the lightest on top; loads lie beside it for speed.
    heap = np.argsort(base, kind="mergesort")
    loads = base[heap]
    size = np.zeros(num_parts, dtype=np.int64)
    amount = np.zeros(num_parts, dtype=np.int64)
    end = num_parts
    spare = len(work) - num_parts * fewest  # samples that no part needs to have its fewest
    sample = 0
    while sample < len(work) and end > 0:
        at = 0
        part = heap[0]
        if size[part] >= most or (size[part] >= fewest and spare == 0):
            end -= 1
            part, load = heap[end], loads[end]
        else:
            if amount[part] + tokens[sample] > max_tokens:
                room = max_tokens - tokens[sample]
                at = _lightest_with_room(
                    heap[:end], loads, size, amount, room, fewest if spare == 0 else most
                )
                if at == NONE:
                    break
                part = heap[at]
            spare -= size[part] >= fewest
            part_of[sample] = part
            size[part] += 1
            amount[part] += tokens[sample]
            load = loads[at] + work[sample]
            sample += 1
        # Written out: as a function of its own it would take most of the time, in counting references.
        while 2 * at + 1 < end:
            child = 2 * at + 1
            if child + 1 < end:
                if loads[child + 1] == loads[child]:
                    child += size[heap[child + 1]] < size[heap[child]]
                else:
                    child += loads[child + 1] < loads[child]
            if loads[child] > load or (loads[child] == load and size[heap[child]] >= size[part]):
                break
            heap[at], loads[at] = heap[child], loads[child]
            at = child
        heap[at], loads[at] = part, load
    return part_of


@compiled
def _lightest_with_room(
    heap: np.ndarray, loads: np.ndarray, size: np.ndarray, amount: np.ndarray, room: int, most: int
) -> int:
    """Where in the heap the lightest part with at most `room` tokens and fewer than `most` samples is."""
    best = NONE
    for at in range(len(heap)):
        part = heap[at]
        if amount[part] > room or size[part] >= most:
            continue
        if best == NONE or (loads[at], size[part], part) < (loads[best], size[heap[best]], heap[best]):
            best = at
    return best
