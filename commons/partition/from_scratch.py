"""Partitions to start from: longest first, and differencing; and the better of both, refined."""

from __future__ import annotations

import numpy as np
from numba import njit

from .compiled import compiled, inner
from .search import (
    NO_CAP,
    NONE,
    RESOLUTION,
    Limits,
    are_unequal,
    ascending,
    base_of,
    refine_to,
    sum_per_part,
    target_time,
    time_of,
)

# Where parts have at most this many samples in the mean, the search is cheap but often gets stuck: it tries
# several starts.
FEW_SAMPLES = 8
# With unequal sizes, differencing takes time in proportion to samples × parts. Where there are many of both
# it is left out: it lowers the largest load by at most 0.01%.
SHORT_DIFFERENCING = 2**17
# Differencing is tried if it may end above the target by at most this share. To refine more than that takes
# longer than to start from longest first.
NEAR = 1e-3
# A share of the target above it at which no other start is tried.
GOOD = 1e-4
# Target times that are tried where speeds differ and the first one is out of reach.
MAX_TRIED_TIMES = 8


@compiled
def place_longest_first(work: np.ndarray, tokens: np.ndarray, base: np.ndarray, limits: Limits) -> np.ndarray:
    """Places each sample, the heaviest first, in the lightest part that can take it.

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969. `base` int64 `[parts]` is the load of
    each part before; `work` and `tokens` are int64 `[samples]`, `work` descending.

    Of equally light parts, the one with fewer samples is lighter: samples that cost nothing are spread, too.

    Returns:
        int64 `[samples]`, the part of each; NONE from the first sample on that no part can take.
    """
    num_parts = len(base)
    fewest, most, max_tokens = limits.fewest, limits.most, limits.max_tokens
    part_of = np.empty(len(work), dtype=np.int64)
    for i in range(len(work)):
        part_of[i] = NONE
    # A heap of the parts that can take more, the lightest on top; loads lie next to it for speed.
    heap, loads = ascending(base), np.empty(num_parts, dtype=np.int64)
    for at in range(num_parts):
        loads[at] = base[heap[at]]
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
                rows = fewest if spare == 0 else most
                at = _lightest_with_room(heap, end, loads, size, amount, room, rows)
                if at == NONE:
                    break
                part = heap[at]
            spare -= size[part] >= fewest
            part_of[sample] = part
            size[part] += 1
            amount[part] += tokens[sample]
            load = loads[at] + work[sample]
            sample += 1
        # Written out: as a function, counting references to its arguments would take most of the time.
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
def _lightest_with_room(
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
def place_by_differencing(work: np.ndarray, num_parts: int, group: int) -> np.ndarray:
    """Merges partial partitions, the two worst balanced first, until one is left.

    Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning", 1982. A merge joins the
    heaviest part of one partition with the lightest of the other, and so on.

    Args:
        work: int64 `[samples]`, descending.
        num_parts: parts, at least 1.
        group: samples of a partition to start with, which are in a part each: 1, or `num_parts` for part
            sizes within one of each other.

    Returns:
        int64 `[samples]`, the part of each.
    """
    num_samples = len(work)
    # A partition lies in consecutive slots, a slot for each part with samples, the heaviest first: its load,
    # and its first and last sample. Merged ones go behind all others; where space ends, the gaps are closed.
    room = 2 * num_samples + num_parts
    load, head, tail = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    after = np.empty(num_samples, dtype=np.int64)  # the next sample of the same part
    for i in range(num_samples):
        load[i], head[i], tail[i], after[i] = work[i], i, i, NONE
    count = (num_samples + group - 1) // group
    start, size = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    heap, spread = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for p in range(count):
        start[p], size[p], heap[p] = p * group, min(num_samples - p * group, group), p
        spread[p] = _spread(load, start[p], size[p], num_parts)
    for at in range(count // 2 - 1, -1, -1):
        _sink(heap, spread, at, count)
    end = num_samples
    sums = np.empty(num_parts, dtype=np.int64)
    while count > 1:
        one = heap[0]
        count -= 1
        heap[0] = heap[count]
        _sink(heap, spread, 0, count)
        other = heap[0]
        length = min(size[one] + size[other], num_parts)
        if end + length > room:
            end = _close_gaps(load, head, tail, start, size)
        # Slot p of the first meets slot length − 1 − p of the second.
        offset, last = length - size[other], start[other] + length - 1
        for p in range(length):
            total = load[start[one] + p] if p < size[one] else 0
            sums[p] = -total - (load[last - p] if p >= offset else 0)
        order = ascending(sums[:length])
        for place in range(length):
            p = order[place]
            load[end + place] = -sums[p]
            if p < offset:
                head[end + place], tail[end + place] = head[start[one] + p], tail[start[one] + p]
            else:
                head[end + place], tail[end + place] = head[last - p], tail[last - p]
                if p < size[one]:
                    after[tail[last - p]] = head[start[one] + p]
                    tail[end + place] = tail[start[one] + p]
        start[one], size[one], size[other] = end, length, 0
        end += length
        heap[0], spread[one] = one, _spread(load, start[one], length, num_parts)
        _sink(heap, spread, 0, count)
    part_of = np.empty(num_samples, dtype=np.int64)
    for part in range(size[heap[0]] if count > 0 else 0):
        sample = head[start[heap[0]] + part]
        while sample != NONE:
            part_of[sample] = part
            sample = after[sample]
    return part_of


def differenced(work: np.ndarray, speeds: np.ndarray, group: int) -> np.ndarray:
    """`place_by_differencing`, and the heaviest part to the fastest."""
    part_of = place_by_differencing(work, len(speeds), group)
    return np.argsort(-speeds, kind="stable")[part_of] if are_unequal(speeds) else part_of


@njit(inline="always")
def _spread(load: np.ndarray, start: int, size: int, num_parts: int) -> int:
    return load[start] - (load[start + size - 1] if size == num_parts else 0)


@inner
def _sink(heap: np.ndarray, spread: np.ndarray, at: int, end: int) -> None:
    """Moves a partition down in the heap; on top is the largest spread, of equal ones the first."""
    p = heap[at]
    while 2 * at + 1 < end:
        child = 2 * at + 1
        if child + 1 < end and _is_above(spread, heap[child + 1], heap[child]):
            child += 1
        if _is_above(spread, p, heap[child]):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = p


@njit(inline="always")
def _is_above(spread: np.ndarray, one: int, other: int) -> bool:
    return spread[one] > spread[other] or (spread[one] == spread[other] and one < other)


@inner
def _close_gaps(
    load: np.ndarray, head: np.ndarray, tail: np.ndarray, start: np.ndarray, size: np.ndarray
) -> int:
    """Moves all partitions to the front; returns the slot after the last."""
    end = 0
    for p in ascending(start):
        begin = start[p]
        for slot in range(size[p]):
            load[end + slot] = load[begin + slot]
            head[end + slot], tail[end + slot] = head[begin + slot], tail[begin + slot]
        start[p] = end
        end += size[p]
    return end


def time_by_differencing(work: np.ndarray, tokens: np.ndarray, speeds: np.ndarray, limits: Limits) -> int:
    """The longest time of differencing with equal sizes; NO_CAP if that does not keep to the limits."""
    return _time_within_limits(work, tokens, differenced(work, speeds, len(speeds)), speeds, limits)


def refined_from_scratch(
    work: np.ndarray, tokens: np.ndarray, speeds: np.ndarray, limits: Limits, tolerance: float
) -> np.ndarray:
    """int64 `[samples]`, the part of each, refined; the last is NONE if some sample has no place.

    Never worse than differencing with equal sizes, where that keeps to the limits.
    """
    if len(work) == 0:
        return np.empty(0, dtype=np.int64)
    num_parts = len(speeds)
    target = target_time(work, speeds, limits, tolerance)
    near = target * (1 + NEAR)
    is_small = len(work) <= FEW_SAMPLES * num_parts
    equal_sizes = best = np.full(len(work), NONE)
    time = NO_CAP
    least = _least_by_differencing(work, num_parts)
    if is_small or least <= near:
        equal_sizes = differenced(work, speeds, num_parts)
        least = _time_within_limits(work, tokens, equal_sizes, speeds, limits)
    if is_small or least <= near:
        best, time = _better(best, time, equal_sizes, least, work, tokens, limits, speeds, target)
    if is_small and limits.fewest < limits.most - 1 and len(work) * num_parts <= SHORT_DIFFERENCING:
        start = differenced(work, speeds, 1)
        start_time = _time_within_limits(work, tokens, start, speeds, limits)
        best, time = _better(best, time, start, start_time, work, tokens, limits, speeds, target)
    if is_small or time > target * (1 + GOOD):
        start = place_longest_first(work, tokens, base_of(speeds, target), limits)
        start_time = _time_within_limits(work, tokens, start, speeds, limits)
        if time == NO_CAP:
            best = start  # even where it leaves samples without a place
        best, time = _better(best, time, start, start_time, work, tokens, limits, speeds, target)
    if time > max(least, target):
        if equal_sizes[-1] == NONE:
            equal_sizes = differenced(work, speeds, num_parts)
        least = _time_within_limits(work, tokens, equal_sizes, speeds, limits)
        if time == NO_CAP:
            best, time = _better(best, time, equal_sizes, least, work, tokens, limits, speeds, target)
        elif least < time:
            best = equal_sizes  # refining it would take longer than all before
    return best


def _better(
    best: np.ndarray,
    time: int,
    start: np.ndarray,
    start_time: int,
    work: np.ndarray,
    tokens: np.ndarray,
    limits: Limits,
    speeds: np.ndarray,
    target: int,
) -> tuple[np.ndarray, int]:
    """The better of `best` and `start`, refined, and its longest time; NO_CAP stands for no partition."""
    if time <= target or start_time == NO_CAP:
        return best, time
    if start_time > target:
        start_time = refine_within(work, tokens, start, speeds, limits, target)
        if start_time > target and are_unequal(speeds):
            start = _heaviest_on_fastest(work, start, speeds)
            start_time = refine_within(work, tokens, start, speeds, limits, target)
    return (start, start_time) if start_time < time else (best, time)


def _heaviest_on_fastest(work: np.ndarray, part_of: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """The same partition, its parts renumbered: the heavier, the faster. No time is longer than before."""
    by_load = np.argsort(-sum_per_part(work, part_of, len(speeds)), kind="stable")
    number = np.empty_like(by_load)
    number[by_load] = np.argsort(-speeds, kind="stable")
    return number[part_of]


def refine_within(
    work: np.ndarray, tokens: np.ndarray, part_of: np.ndarray, speeds: np.ndarray, limits: Limits, target: int
) -> int:
    """Changes `part_of` until no part takes longer than the target, or nothing helps; returns the longest."""
    if not are_unequal(speeds):
        refine_to(work, tokens, part_of, np.zeros(len(speeds), dtype=np.int64), limits, target)
        return int(sum_per_part(work, part_of, len(speeds)).max())
    # Swaps lower the largest load beyond what a time allows, and so find the parts for a time that can be
    # had. Of the times between the target and the best so far, the middle one is tried next.
    time = time_of(work, part_of, speeds)
    tried, failed = target, target
    for _ in range(MAX_TRIED_TIMES):
        if time <= target or time - failed <= RESOLUTION * time:
            break
        found = part_of.copy()
        refine_to(work, tokens, found, base_of(speeds, tried), limits, tried)
        reached = time_of(work, found, speeds)
        if reached < time:
            part_of[:] = found
            time = reached
        if reached > tried:
            failed = tried
        tried = failed + (time - failed) // 2
    return time


@compiled
def _time_within_limits(
    work: np.ndarray, tokens: np.ndarray, part_of: np.ndarray, speeds: np.ndarray, limits: Limits
) -> int:
    """The time of the slowest part; NO_CAP if a sample has none, or a part does not keep to the limits."""
    if len(work) == 0 or part_of[-1] == NONE:
        return NO_CAP
    amount, size = np.zeros(len(speeds), dtype=np.int64), np.zeros(len(speeds), dtype=np.int64)
    for sample in range(len(work)):
        part = part_of[sample]
        amount[part] += tokens[sample]
        size[part] += 1
        if amount[part] > limits.max_tokens or size[part] > limits.most:
            return NO_CAP
    return time_of(work, part_of, speeds)


@compiled
def _least_by_differencing(work: np.ndarray, num_parts: int) -> int:
    """A time that the slowest part takes at least, after differencing with equal sizes.

    Every part gets one sample of each group. The part with the heaviest of one group also gets at least the
    lightest of every other group. No part is faster than 1.
    """
    lightest, widest = 0, 0
    for start in range(0, len(work), num_parts):
        last = start + num_parts - 1
        lightest_of_group = work[last] if last < len(work) else 0
        lightest += lightest_of_group
        widest = max(widest, work[start] - lightest_of_group)
    return lightest + widest
