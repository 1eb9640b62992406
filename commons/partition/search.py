"""The search of every placement: swaps that lighten the heaviest part.

Samples are numbered from the heaviest down, so comparing two numbers compares workloads and breaks ties.
Loads are integers: sums are exact in any order, and no machine's way of adding decides a tie.

Parts have speeds: float64 `[parts]`, 1.0 for the fastest. The time of a part is its load ÷ its speed.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import numpy as np
from numba import njit

from .compiled import compiled, inner

# In place of a sample, a part, or a position. Numba compiles functions anew for literals such as -1.
NONE = cast(int, np.int64(-1))
NO_CAP = 2**62

# A swap that lightens the heaviest part by less than this share of the mean load is not worth its time.
RESOLUTION = 3e-5
# A swap is accepted once it brings the heaviest part near the middle between it and the lightest: within 1/8
# of their distance. Until then, this many partners are tried in either direction after the first swap.
NEAR_ENOUGH = 8
TRIES = 16
# Partners that the search looks at: this many × samples × the logarithm of their number. Then it takes what
# it has. Under tight caps hardly any swap is allowed, and it would look at all of them again and again.
LOOKS = 16
# Runs of a merge sort that insertion sorts.
SHORT_RUN = 16


class Limits(NamedTuple):
    """Limits of every part.

    Attributes:
        fewest, most: samples of a part.
        max_tokens: sum of a part's tokens.
    """

    fewest: int
    most: int
    max_tokens: int


class Parts(NamedTuple):
    """A partition that the search changes; all arrays are int64.

    Attributes:
        work: `[samples]`, descending.
        tokens: `[samples]`.
        part_of: `[samples]`, the part of each.
        members: the samples of part p, ascending, from `start[p]` on; room for more follows them.
        start: `[parts + 1]`, positions in `members`.
        size: `[parts]`, samples.
        load, amount: `[parts]`, sums of work and of tokens.
        by_load: `[parts]`, the lightest part first; of equally light parts, the one with the smaller index.
        place: `[parts]`, position of each part in `by_load`.
    """

    work: np.ndarray
    tokens: np.ndarray
    part_of: np.ndarray
    members: np.ndarray
    start: np.ndarray
    size: np.ndarray
    load: np.ndarray
    amount: np.ndarray
    by_load: np.ndarray
    place: np.ndarray


@compiled
def sum_per_part(values: np.ndarray, part_of: np.ndarray, num_parts: int) -> np.ndarray:
    """int64 `[parts]`: the sums of int64 `[samples]`."""
    sums = np.zeros(num_parts, dtype=np.int64)
    for sample in range(len(values)):
        sums[part_of[sample]] += values[sample]
    return sums


@compiled
def grouped(part_of: np.ndarray, num_parts: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices of all parts, one part after the other, each ascending; and where each part ends."""
    ends = np.zeros(num_parts + 1, dtype=np.int64)
    for part in part_of:
        ends[part + 1] += 1
    for part in range(num_parts):
        ends[part + 1] += ends[part]
    indices = np.empty(len(part_of), dtype=np.int64)
    for index in range(len(part_of)):  # `ends` grow from where parts start to where they end
        part = part_of[index]
        indices[ends[part]] = index
        ends[part] += 1
    return indices, ends[:num_parts]


@inner
def ascending(values: np.ndarray) -> np.ndarray:
    """int64 `[values]`: the positions of the smallest value to the largest; ties by position."""
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


def shortest_time(work: np.ndarray, speeds: np.ndarray, limits: Limits) -> float:
    """A time that the slowest part takes at least; `lower_bound` gives the proof."""
    return _shortest_time(work, np.sort(speeds) if are_unequal(speeds) else speeds, limits)


@compiled
def _shortest_time(work: np.ndarray, speeds: np.ndarray, limits: Limits) -> float:
    """`shortest_time`, given ascending speeds."""
    num_samples, num_parts = len(work), len(speeds)
    sums = np.zeros(num_samples + 1, dtype=np.int64)  # of the heaviest samples
    for sample in range(num_samples):
        sums[sample + 1] = sums[sample] + work[sample]
    fastest = np.empty(num_parts)  # q of them together, at q − 1
    fastest[0] = speeds[num_parts - 1]
    for q in range(1, num_parts):
        fastest[q] = fastest[q - 1] + speeds[num_parts - 1 - q]
    bound = sums[num_samples] / fastest[num_parts - 1]
    for before in range(0, num_samples, num_parts):
        j = before // num_parts + 1
        for q in range(1, min(num_parts, num_samples - before) + 1):
            m, others = before + q, max(limits.fewest - j, 0) * q
            load = sums[m] - sums[m - j * q] + sums[num_samples] - sums[num_samples - others]
            if load > bound * fastest[q - 1]:
                bound = load / fastest[q - 1]
    slowest = 0.0
    for q in range(1, num_parts if speeds[0] < 1.0 else 0):
        slowest += speeds[q - 1]
        rows = max(q * limits.fewest, num_samples - (num_parts - q) * limits.most)
        bound = max(bound, (sums[num_samples] - sums[num_samples - rows]) / slowest)
    return bound


def are_unequal(speeds: np.ndarray) -> bool:
    """Whether some part is slower than the fastest, whose speed is 1."""
    return bool(speeds.min() < 1.0)


def target_time(work: np.ndarray, speeds: np.ndarray, limits: Limits, tolerance: float) -> int:
    """The time at which the slowest part is fast enough: (1 + tolerance) × the lower bound."""
    bound = shortest_time(work, speeds, limits)
    target = max(math.ceil(bound), int(min(bound * (1 + tolerance), 2.0**61)))
    # Loads that a time allows are rounded down. This much more, they are what the bound was worked out from.
    return target + (int(1 / speeds.min()) + 1 if are_unequal(speeds) else 0)


def base_of(speeds: np.ndarray, time: int) -> np.ndarray:
    """int64 `[parts]`, what slower parts have less room for in this time than the fastest.

    Counted as loads from the start, all parts may come up to one target, and need no speeds.
    """
    if not are_unequal(speeds):
        return np.zeros(len(speeds), dtype=np.int64)
    return np.where(speeds < 1.0, time - (time * speeds).astype(np.int64), 0)


@compiled
def longest_time(load: np.ndarray, speeds: np.ndarray) -> int:
    """The time of the slowest part: the largest load ÷ speed."""
    longest = 0
    for part in range(len(speeds)):
        time = load[part] if speeds[part] == 1.0 else int(load[part] / speeds[part])
        longest = max(longest, time)
    return longest


@compiled
def time_of(work: np.ndarray, part_of: np.ndarray, speeds: np.ndarray) -> int:
    """The time of the slowest part of a partition, int64 `[samples]`."""
    return longest_time(sum_per_part(work, part_of, len(speeds)), speeds)


@compiled
def refine_to(
    work: np.ndarray, tokens: np.ndarray, part_of: np.ndarray, base: np.ndarray, limits: Limits, target: int
) -> None:
    """Changes `part_of` until no part is above the target load, or no swap helps."""
    parts = make_parts(work, tokens, part_of, base)
    total = 0
    for each in work:
        total += each
    least = max(int(RESOLUTION * total / len(base)), 1)
    most_looks = most_looks_at(len(work))
    while len(base) > 1:
        heavy = parts.by_load[-1]
        if parts.load[heavy] <= target:
            break
        gives, partner, returns, looks = lightening_swap(parts, limits, heavy, least, most_looks)
        most_looks -= looks
        if partner == NONE or most_looks < 0:
            break
        swap(parts, heavy, gives, partner, returns)


@inner
def most_looks_at(count: int) -> int:
    """LOOKS × n × log2(n) for n samples."""
    bits = 1
    while count >> bits:
        bits += 1
    return LOOKS * count * bits


@compiled
def make_parts(work: np.ndarray, tokens: np.ndarray, part_of: np.ndarray, base: np.ndarray) -> Parts:
    """The parts of a given partition; swaps change `part_of`, too. Loads come on top of `base` `[parts]`."""
    num_parts = len(base)
    members = np.empty(2 * len(work) + 4 * num_parts, dtype=np.int64)  # what _lay_out needs
    start, size = np.zeros(num_parts + 1, dtype=np.int64), np.zeros(num_parts, dtype=np.int64)
    load = base + sum_per_part(work, part_of, num_parts)
    amount = sum_per_part(tokens, part_of, num_parts)
    by_load, place = ascending(load), np.empty(num_parts, dtype=np.int64)
    for at in range(num_parts):
        place[by_load[at]] = at
    parts = Parts(work, tokens, part_of, members, start, size, load, amount, by_load, place)
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
    if returns == NONE and parts.start[taker] + parts.size[taker] == parts.start[taker + 1]:
        _lay_out(parts)
    if returns != NONE:
        _remove(parts, taker, returns)
    _remove(parts, giver, gives)
    _insert(parts, taker, gives)
    if returns != NONE:
        _insert(parts, giver, returns)
    _reorder(parts, giver)
    _reorder(parts, taker)


@njit(inline="always")
def fits(parts: Parts, limits: Limits, giver: int, gives: int, taker: int, returns: int) -> bool:
    """Whether that swap keeps both parts within `limits.max_tokens`."""
    change = parts.tokens[gives] - (parts.tokens[returns] if returns != NONE else 0)
    if change > 0:
        return parts.amount[taker] + change <= limits.max_tokens
    return change == 0 or parts.amount[giver] - change <= limits.max_tokens


@inner
def lightening_swap(
    parts: Parts, limits: Limits, heavy: int, least: int, most_looks: int
) -> tuple[int, int, int, int]:
    """Finds the swap that most lowers the larger of two loads, by at least `least`.

    Returns (sample given, partner, sample returned, partners looked at).

    The partner is NONE if there is no such swap among the first `most_looks`. The best sample to get in
    return for one of the heavy part takes half the distance to the lightest part. From there, samples are
    tried in both directions for as long as they can be better than the swap found so far.
    """
    work, part_of, loads = parts.work, parts.part_of, parts.load
    load, lightest = loads[heavy], loads[parts.by_load[0]]
    below = load - least + 1
    enough = load - (load - lightest) // 2 + (load - lightest) // NEAR_ENOUGH
    gives, partner, returns, looks = NONE, NONE, NONE, 0
    taker = NONE if parts.size[heavy] == limits.fewest else _lightest_taker(parts, limits, heavy, NONE)
    for at in range(parts.start[heavy], parts.start[heavy] + parts.size[heavy]):
        i = parts.members[at]
        middle = _first_at_most(work, i + 1, work[i] - (load - lightest) // 2)
        for step in (1, -1):
            j = middle if step == 1 else middle - 1
            while i < j < len(work) and (partner == NONE or abs(j - middle) <= TRIES):
                difference = work[i] - work[j]
                if (lightest + difference if step == 1 else load - difference) >= below:
                    break
                larger = max(load - difference, loads[part_of[j]] + difference)
                if larger < below and part_of[j] != heavy and fits(parts, limits, heavy, i, part_of[j], j):
                    below, gives, partner, returns = larger, i, part_of[j], j
                j += step
                looks += 1
        if taker != NONE and max(load - work[i], loads[taker] + work[i]) < below:
            other = _lightest_taker(parts, limits, heavy, i)  # the same, unless it has no room for its tokens
            if other != NONE and max(load - work[i], loads[other] + work[i]) < below:
                below, gives, partner, returns = max(load - work[i], loads[other] + work[i]), i, other, NONE
        if looks > most_looks or (partner != NONE and below <= enough):
            break
    return gives, partner, returns, looks


@njit(inline="always")
def first_below(work: np.ndarray, members: np.ndarray, start: int, end: int, value: int) -> int:
    """The first position from `start` to `end` whose sample has less work than `value`."""
    while start < end:
        middle = (start + end) // 2
        if work[members[middle]] < value:
            end = middle
        else:
            start = middle + 1
    return start


@inner
def _lightest_taker(parts: Parts, limits: Limits, giver: int, sample: int) -> int:
    """The lightest part with room for one more sample, and for this one unless it is NONE; else NONE."""
    for taker in parts.by_load:
        if taker == giver or parts.size[taker] == limits.most:
            continue
        if sample == NONE or fits(parts, limits, giver, sample, taker, NONE):
            return taker
    return NONE


@inner
def _first_at_most(work: np.ndarray, start: int, value: int) -> int:
    """The first sample from `start` on whose work is at most `value`; the number of samples if none is."""
    left = len(work) - start
    while left > 1:  # without a branch, which the processor would mispredict every other time
        half = left // 2
        start += half * (work[start + half - 1] > value)
        left -= half
    return start + (left == 1 and work[start] > value)


@inner
def _remove(parts: Parts, part: int, sample: int) -> None:
    members = parts.members
    last = parts.start[part] + parts.size[part] - 1
    i = parts.start[part]
    while members[i] != sample:
        i += 1
    while i < last:
        members[i] = members[i + 1]
        i += 1
    parts.size[part] -= 1
    parts.load[part] -= parts.work[sample]
    parts.amount[part] -= parts.tokens[sample]


@inner
def _insert(parts: Parts, part: int, sample: int) -> None:
    members, start = parts.members, parts.start[part]
    i = start + parts.size[part]
    while i > start and members[i - 1] > sample:
        members[i] = members[i - 1]
        i -= 1
    members[i] = sample
    parts.part_of[sample] = part
    parts.size[part] += 1
    parts.load[part] += parts.work[sample]
    parts.amount[part] += parts.tokens[sample]


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
