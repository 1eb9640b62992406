"""Placements to start from: longest first, differencing, and units of groups."""

from __future__ import annotations

import numpy as np

from .compiled import compiled, inner
from .costs import Costs
from .parts import NONE, Task, argsort


@compiled
def place_longest_first(task: Task) -> np.ndarray:
    """int64 `[samples]`, the part of each, as of `longest_processing_time`; NONE from one without a place on.

    Of equally light parts, the one with fewer samples is lighter: samples that cost nothing are spread, too.

    Example: work [8, 7, 6, 5, 4] on two parts goes to parts [0, 1, 1, 0, 0], with loads of 17 and 13.
    """
    work, tokens, fewest, most = task.work, task.tokens, task.fewest, task.most
    num_parts = len(task.initial)
    part_of = np.full(len(work), NONE)
    # A heap of the parts that can take more, the lightest on top; loads lie next to it for speed.
    heap, loads = argsort(task.initial), np.empty(num_parts, dtype=np.int64)
    for at in range(num_parts):
        loads[at] = task.initial[heap[at]]
    size = np.zeros(num_parts, dtype=np.int64)
    amount = np.zeros(num_parts, dtype=np.int64)
    end = num_parts
    spare = len(work) - num_parts * fewest  # samples that no part needs to have its fewest
    sample = 0
    while sample < len(work) and end > 0:
        at = 0
        part = heap[0]
        if size[part] >= most or (size[part] >= fewest and spare == 0):  # 1. A full part leaves the heap.
            end -= 1
            part, load = heap[end], loads[end]
        else:  # 2. The lightest part that has room for the tokens takes the sample.
            if amount[part] + tokens[sample] > task.max_tokens:
                room = task.max_tokens - tokens[sample]
                rows = fewest if spare == 0 else most
                at = _find_lightest(heap, end, loads, size, amount, room, rows)
                if at == NONE:
                    break
                part = heap[at]
            spare -= size[part] >= fewest
            part_of[sample] = part
            size[part] += 1
            amount[part] += tokens[sample]
            load = loads[at] + work[sample]
            sample += 1
        # 3. The part sinks below the lighter ones. In a function of its own, counting references to its
        # arguments would take most of the time.
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


@inner
def _find_lightest(
    heap: np.ndarray, end: int, loads: np.ndarray, size: np.ndarray, amount: np.ndarray, room: int, most: int
) -> int:
    """Position in the heap of the lightest part with at most `room` tokens and fewer than `most` samples."""
    best = NONE
    for at in range(end):
        part = heap[at]
        if amount[part] > room or size[part] >= most:
            continue
        if best == NONE or (loads[at], size[part], part) < (loads[best], size[heap[best]], heap[best]):
            best = at
    return best


@compiled
def place_by_differencing(work: np.ndarray, num_parts: int, width: int) -> np.ndarray:
    """int64 `[samples]`, the part of each, by merging partial partitions, the two worst balanced first.

    A merge joins the heaviest part of one partition with the lightest of the other, and so on. Partitions
    start with `width` samples of `work`, which is descending, each in a part of its own.

    Example: work [8, 7, 6, 5, 4] on two parts starts as (8, 0), (7, 0), (6, 0), (5, 0), (4, 0). The worst
    balanced are the first two; merged, they are (8, 7). Then 6 and 5 become (6, 5). 4 joins 7 to (11, 8),
    which meets (6, 5) to end as (8 + 6, 7 + 4 + 5) = (14, 16).
    """
    num_samples = len(work)
    # 1. A partition is a chain of slots, one for each part with samples, the heaviest first: `below` leads to
    # the next. A slot is named by its first sample; `after` leads to the other samples of the part.
    load, tail, below = work.copy(), np.arange(num_samples), np.arange(1, num_samples + 1)
    after = np.full(num_samples, NONE)
    count = (num_samples + width - 1) // width
    top, size = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    heap, spread = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for p in range(count):
        top[p], size[p], heap[p] = p * width, min(num_samples - p * width, width), p
        spread[p] = work[p * width] - (work[p * width + width - 1] if size[p] == num_parts else 0)
    for at in range(count // 2 - 1, -1, -1):
        _sink(heap, spread, at, count)
    slots, sums = np.empty((2, num_parts), dtype=np.int64)
    while count > 1:
        # 2. Take the two partitions with the largest spreads, the distance of their heaviest and lightest.
        one = heap[0]
        count -= 1
        heap[0] = heap[count]
        _sink(heap, spread, 0, count)
        other = heap[0]
        # 3. Slot p of the first meets slot length − 1 − p of the second.
        length, rows = min(size[one] + size[other], num_parts), size[one]
        alone = length - size[other]
        slot = top[other]
        for p in range(length - 1, alone - 1, -1):
            slots[p] = slot
            slot = below[slot]
        slot = top[one]
        for p in range(length):
            if p < alone:
                slots[p] = slot
            elif p < rows:
                joined = slots[p]
                load[joined] += load[slot]
                after[tail[joined]] = slot
                tail[joined] = tail[slot]
            if p < rows:
                slot = below[slot]
            sums[p] = -load[slots[p]]
        order = argsort(sums[:length])
        for place in range(1, length):
            below[slots[order[place - 1]]] = slots[order[place]]
        # 4. The merged partition takes the place of the second in the heap.
        top[one], size[one], heap[0] = slots[order[0]], length, one
        lightest = load[slots[order[length - 1]]] if length == num_parts else 0
        spread[one] = load[top[one]] - lightest
        _sink(heap, spread, 0, count)
    # 5. Follow the samples of each part of the last partition.
    part_of = np.empty(num_samples, dtype=np.int64)
    slot = top[heap[0]] if count > 0 else NONE
    for part in range(size[heap[0]] if count > 0 else 0):
        sample = slot
        while sample != NONE:
            part_of[sample] = part
            sample = after[sample]
        slot = below[slot]
    return part_of


@inner
def _sink(heap: np.ndarray, spread: np.ndarray, at: int, end: int) -> None:
    """Moves a partition down in the heap; on top is the largest spread, of equal ones the first."""
    p = heap[at]
    while 2 * at + 1 < end:
        child, top = 2 * at + 1, heap[2 * at + 1]
        if child + 1 < end and (-spread[heap[child + 1]], heap[child + 1]) < (-spread[top], top):
            child, top = child + 1, heap[child + 1]
        if (-spread[p], p) < (-spread[top], top):
            break
        heap[at] = top
        at = child
    heap[at] = p


@compiled
def bound_differencing(work: np.ndarray, num_parts: int) -> int:
    """A time that the slowest part, at most of speed 1, takes at least after differencing with equal sizes.

    The part with the heaviest of `num_parts` consecutive samples gets at least the lightest of all others.
    """
    lightest, widest = 0, 0
    for start in range(0, len(work), num_parts):
        last = start + num_parts - 1
        lightest_of_these = work[last] if last < len(work) else 0
        lightest += lightest_of_these
        widest = max(widest, work[start] - lightest_of_these)
    return lightest + widest


@compiled
def place_units(
    task: Task,
    costs: Costs,
    samples: np.ndarray,
    ends: np.ndarray,
    order: np.ndarray,
    lightest: np.ndarray,
    cut_at: int,
) -> np.ndarray:
    """int64 `[samples]`, the part of each: units at home where there is room, else in the lightest part.

    `samples` are sorted by unit and `ends` is where each unit ends; `order` is that of placing units. With r
    rows to come, a part needs the load `lightest[r]` for them. A unit that would exceed `cut_at` is cut.
    """
    home, most, num_parts = costs.home, task.most, len(task.initial)
    part_of = np.full(len(samples), NONE)
    load, size = task.initial.copy(), np.zeros(num_parts, dtype=np.int64)
    at_home, sums = np.zeros(num_parts, dtype=np.int64), np.zeros(len(samples) + 1, dtype=np.int64)
    for unit in order:
        first = ends[unit - 1] if unit > 0 else 0
        while first < ends[unit]:
            # 1. Add up the unit's work, and what stays at home with each part.
            rows = ends[unit] - first
            for at in range(rows):
                sample = samples[first + at]
                sums[at + 1] = sums[at] + task.work[sample]
                at_home[home[sample]] += costs.to_move[sample]
            # 2. Take the home with room where most of it stays.
            best, count = NONE, rows
            for sample in samples[first : ends[unit]]:
                part = home[sample]
                left = most - size[part] - rows
                if left < 0 or load[part] + sums[rows] + lightest[left] > task.target:
                    continue
                if best == NONE or (at_home[part], -load[part]) > (at_home[best], -load[best]):
                    best = part
            for sample in samples[first : ends[unit]]:
                at_home[home[sample]] = 0
            # 3. Without such a home, take the part with most room, and place the rest again.
            if best == NONE:
                best, count = _find_room(load, size, most, lightest, cut_at, sums[: rows + 1])
            for sample in samples[first : first + count]:
                part_of[sample] = best
            load[best] += sums[count]
            size[best] += count
            first += count
    return part_of


@inner
def _find_room(
    load: np.ndarray, size: np.ndarray, most: int, lightest: np.ndarray, cut_at: int, sums: np.ndarray
) -> tuple[int, int]:
    """The part that takes most of a unit, the lightest of these, and how many, given `sums` of its first."""
    best, count = NONE, 0
    for part in range(len(load)):
        left = most - size[part]
        fits, end = 0, min(len(sums) - 1, left)
        while fits < end:
            middle = (fits + end + 1) // 2
            if load[part] + sums[middle] + lightest[left - middle] <= cut_at:
                fits = middle
            else:
                end = middle - 1
        if left == 0 or fits < count:
            continue
        is_lighter = best == NONE or load[part] + lightest[left] < load[best] + lightest[most - size[best]]
        if fits > count or is_lighter:
            best, count = part, fits
    return best, max(count, 1)
