"""Parts that searches change: their samples, loads, and tokens.

Samples are numbered from the heaviest down, so comparing two numbers compares workloads and breaks ties.
Loads are integers: sums are exact in any order, and no machine's way of adding decides a tie.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numba import njit

from .compiled import compiled, inner

# In place of a sample, a part, or a position. Numba compiles functions anew for literals such as -1.
NONE = cast(int, np.int64(-1))
NO_CAP = 2**62
# A swap that lightens the heaviest part by less than this share of the mean load is not worth its time.
RESOLUTION = 3e-5
# Runs of a merge sort that insertion sorts.
SHORT_RUN = 16


class Task(NamedTuple):
    """Samples to place, and what a part may take; all arrays are int64."""

    work: np.ndarray  # [samples], descending
    tokens: np.ndarray  # [samples]
    initial: np.ndarray  # [parts], the load that each part carries before its first sample
    target: int  # a part is light enough with this load, the initial one included
    fewest: int  # samples of a part
    most: int
    max_tokens: int  # sum of a part's tokens


class Parts(NamedTuple):
    """A placement of a task's samples that a search changes; all arrays are int64.

    It repeats the task's fields. To reach into a tuple within a tuple, numba counts references to all arrays
    of the inner one, which made searches under token caps ten times slower.
    """

    work: np.ndarray
    tokens: np.ndarray
    target: int
    fewest: int
    most: int
    max_tokens: int
    part_of: np.ndarray  # [samples], the part of each
    members: np.ndarray  # the samples of part p, ascending, from start[p] on; room for more follows them
    start: np.ndarray  # [parts + 1], positions in `members`
    size: np.ndarray  # [parts], samples
    load: np.ndarray  # [parts], sums of work, on top of the initial load
    amount: np.ndarray  # [parts], sums of tokens
    by_load: np.ndarray  # [parts], the lightest part first; of equally light parts, the smaller index
    place: np.ndarray  # [parts], position of each part in `by_load`


@compiled
def sum_per_part(values: np.ndarray, part_of: np.ndarray, num_parts: int) -> np.ndarray:
    """Adds int64 `[samples]` up to int64 `[parts]`."""
    sums = np.zeros(num_parts, dtype=np.int64)
    for sample in range(len(values)):
        sums[part_of[sample]] += values[sample]
    return sums


@compiled
def longest_time(load: np.ndarray, speeds: np.ndarray) -> int:
    """The time of the slowest part: the largest load ÷ speed, both `[parts]`."""
    longest = 0
    for part in range(len(speeds)):
        time = load[part] if speeds[part] == 1.0 else int(load[part] / speeds[part])
        longest = max(longest, time)
    return longest


@compiled
def bucket(numbers: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorts the indices of int64 `numbers` by number, stably, and tells where each of `count` numbers ends.

    Example: parts [1, 0, 1, 2] of four samples become samples [1, 0, 2, 3], which end at [1, 3, 4].
    """
    ends = np.zeros(count + 1, dtype=np.int64)
    for number in numbers:
        ends[number + 1] += 1
    for number in range(count):
        ends[number + 1] += ends[number]
    indices = np.empty(len(numbers), dtype=np.int64)
    for index in range(len(numbers)):  # `ends` grow from where numbers start to where they end
        number = numbers[index]
        indices[ends[number]] = index
        ends[number] += 1
    return indices, ends[:count]


@inner
def argsort(values: np.ndarray) -> np.ndarray:
    """Stable argsort of int64 `[values]`, which compiles faster than NumPy's."""
    count = len(values)
    order, spare = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for i in range(count):  # short runs by insertion
        value, j = values[i], i
        while j % SHORT_RUN > 0 and values[order[j - 1]] > value:
            order[j] = order[j - 1]
            j -= 1
        order[j] = i
    width = SHORT_RUN
    while width < count:  # and then merges of two runs
        for start in range(0, count, 2 * width):
            left, right = start, min(start + width, count)
            middle, end = right, min(start + 2 * width, count)
            for at in range(start, end):
                if right == end or (left < middle and values[order[left]] <= values[order[right]]):
                    spare[at] = order[left]
                    left += 1
                else:
                    spare[at] = order[right]
                    right += 1
        order, spare = spare, order
        width *= 2
    return order


@compiled
def make_parts(task: Task, part_of: np.ndarray) -> Parts:
    """Makes the parts of a placement, int64 `[samples]`, which swaps change, too."""
    num_parts = len(task.initial)
    members = np.empty(2 * len(part_of) + 4 * num_parts, dtype=np.int64)  # what _lay_out needs
    start, size = np.zeros(num_parts + 1, dtype=np.int64), np.zeros(num_parts, dtype=np.int64)
    load = task.initial + sum_per_part(task.work, part_of, num_parts)
    amount = sum_per_part(task.tokens, part_of, num_parts)
    by_load, place = argsort(load), np.empty(num_parts, dtype=np.int64)
    for at in range(num_parts):
        place[by_load[at]] = at
    work, tokens, _, target, fewest, most, max_tokens = task
    parts = Parts(
        *(work, tokens, target, fewest, most, max_tokens),
        *(part_of, members, start, size, load, amount, by_load, place),
    )
    _lay_out(parts)
    return parts


@inner
def _lay_out(parts: Parts) -> None:
    """Writes `members`, `start` and `size` from `part_of`, with room for every part to double."""
    size, start, part_of, members = parts.size, parts.start, parts.part_of, parts.members
    for part in range(len(size)):
        size[part] = 0
    for part in part_of:
        size[part] += 1
    for part in range(len(size)):
        start[part + 1] = start[part] + 2 * size[part] + 4
        size[part] = 0
    for sample in range(len(part_of)):
        part = part_of[sample]
        members[start[part] + size[part]] = sample
        size[part] += 1


@inner
def swap(parts: Parts, giver: int, gives: int, taker: int, returns: int) -> None:
    """Moves sample `gives` from part `giver` to part `taker`, and `returns` back unless it is NONE."""
    _move(parts, giver, gives, taker)
    if returns != NONE:
        _move(parts, taker, returns, giver)
    _reorder(parts, giver)
    _reorder(parts, taker)


@inner
def _move(parts: Parts, giver: int, sample: int, taker: int) -> None:
    members, start, size = parts.members, parts.start, parts.size
    if start[taker] + size[taker] == start[taker + 1]:
        _lay_out(parts)
    # 1. Take it out, and close the gap.
    at, last = start[giver], start[giver] + size[giver] - 1
    while members[at] != sample:
        at += 1
    while at < last:
        members[at] = members[at + 1]
        at += 1
    # 2. Insert it, in ascending order.
    at = start[taker] + size[taker]
    while at > start[taker] and members[at - 1] > sample:
        members[at] = members[at - 1]
        at -= 1
    members[at] = sample
    # 3. Update the sums.
    parts.part_of[sample] = taker
    for part, change in ((giver, -1), (taker, 1)):
        size[part] += change
        parts.load[part] += change * parts.work[sample]
        parts.amount[part] += change * parts.tokens[sample]


@inner
def _reorder(parts: Parts, part: int) -> None:
    """Moves a part whose load has changed to its position in `by_load`."""
    by_load, place, load = parts.by_load, parts.place, parts.load
    i = place[part]
    while i + 1 < len(by_load) and (load[by_load[i + 1]], by_load[i + 1]) < (load[part], part):
        by_load[i] = by_load[i + 1]
        place[by_load[i]] = i
        i += 1
    while i > 0 and (load[part], part) < (load[by_load[i - 1]], by_load[i - 1]):
        by_load[i] = by_load[i - 1]
        place[by_load[i]] = i
        i -= 1
    by_load[i] = part
    place[part] = i


@compiled
def even_out(task: Task, part_of: np.ndarray) -> None:
    """Changes `part_of` until all sizes are within the limits, one move from the largest part at a time."""
    parts = make_parts(task, part_of)
    while True:
        giver, taker = np.argmax(parts.size), np.argmin(parts.size)
        if parts.size[taker] >= task.fewest and parts.size[giver] <= task.most:
            return
        if parts.size[taker] >= task.fewest:
            for taker in parts.by_load:
                if parts.size[taker] < task.most:
                    break
        wanted = (parts.load[giver] - parts.load[taker]) // 2
        at, last = parts.start[giver], parts.start[giver] + parts.size[giver] - 1
        while at < last and task.work[parts.members[at]] > wanted:
            at += 1
        swap(parts, giver, parts.members[at], taker, NONE)


@njit(inline="always")
def find_below(work: np.ndarray, members: np.ndarray, start: int, end: int, value: int) -> int:
    """The first position from `start` to `end` whose sample has less work than `value`."""
    while start < end:
        middle = (start + end) // 2
        if work[members[middle]] < value:
            end = middle
        else:
            start = middle + 1
    return start


@njit(inline="always")
def fits_tokens(parts: Parts, giver: int, taker: int, change: int) -> bool:
    """Whether both parts keep within `max_tokens` if so many tokens go from one to the other."""
    if change > 0:
        return parts.amount[taker] + change <= parts.max_tokens
    return change == 0 or parts.amount[giver] - change <= parts.max_tokens


@njit(inline="always")
def fits(parts: Parts, giver: int, gives: int, taker: int, returns: int) -> bool:
    """Whether that swap keeps both parts within `max_tokens`."""
    tokens = parts.tokens
    change = tokens[gives] - (tokens[returns] if returns != NONE else 0)
    return fits_tokens(parts, giver, taker, change)
