"""The search for parts that keep groups of samples together, and are balanced.

A part hands over samples of one group, and gets samples of another back where rows must not change. A group
in several parts has copies: each of these parts looks its ids up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from commons.partition.compiled import compiled
from commons.partition.from_scratch import refined_from_scratch
from commons.partition.search import NONE, RESOLUTION, Limits, Parts, base_of, sum_per_part, swap
from commons.partition.search_from_home import Costs, nearest_home

# Parts considered for a swap: this many that can help, among this many of the lightest.
PARTNERS, CANDIDATES = 8, 16
# Passes over all parts; each helps less than the one before.
PASSES = 3
# A pool of more parts leaves too few of their samples at home.
MOST_IN_POOL = 16
# A sample may join any of this many of its group, the heaviest. Trying all takes time quadratic in the group,
# which may be a default user with many samples.
MOST_TO_JOIN = 16


class Groups(NamedTuple):
    """Groups of samples, which are numbered group by group, from the heaviest of each down; all int64.

    Attributes:
        group_of: `[samples]`, ascending.
        start: `[groups + 1]`, the first sample of each group.
        of_copy: `[groups]`, cost of each part that has samples of the group, beyond the first.
        of_move: `[samples]`, cost of each that is not at home.
        home: `[samples]`.
    """

    group_of: np.ndarray
    start: np.ndarray
    of_copy: np.ndarray
    of_move: np.ndarray
    home: np.ndarray


class Swap(NamedTuple):
    """Samples of one group for samples of another.

    Attributes:
        giver, taker: parts; the taker is NONE for no swap.
        gives, returns: positions in the members of giver and taker: of the first sample to give, and behind
            the last to return.
        num_given, num_returned: samples; all of one group each.
    """

    giver: int
    taker: int
    gives: int
    returns: int
    num_given: int
    num_returned: int


@compiled
def level_groups(parts: Parts, limits: Limits, groups: Groups, target: int) -> None:
    """Makes swaps so that no part is above the target: first those that add no copy."""
    least = max(int(RESOLUTION * target), 1)
    for _ in range(PASSES):
        for heavy in parts.by_load[::-1].copy():
            while parts.load[heavy] > target:
                found = _best_swap(parts, limits, groups, heavy, target, least)
                if found.taker == NONE:
                    break
                _make(parts, found)


@compiled
def even_out_groups(parts: Parts, limits: Limits, groups: Groups) -> None:
    """Moves samples until all sizes are within the limits, whole groups where these are small enough."""
    while parts.size.min() < limits.fewest or parts.size.max() > limits.most:
        giver, taker = int(np.argmax(parts.size)), int(np.argmin(parts.size))
        most = max(min(parts.size[giver] - limits.most, limits.most - parts.size[taker]), 1)
        best, least = Swap(giver, NONE, 0, 0, 0, 0), np.inf
        first, end = parts.start[giver], parts.start[giver] + parts.size[giver]
        while first < end:
            after = _end_of_group(parts, groups, first, end)
            count = min(after - first, most)
            cost = _copies(parts, groups, giver, first, after, count, taker)
            for at in range(first, first + count):
                cost += _cost_of_move(groups, parts.members[at], giver, taker)
            if cost / count < least:
                best, least = Swap(giver, taker, first, 0, count, 0), cost / count
            first = after
        _make(parts, best)


@compiled
def _best_swap(parts: Parts, limits: Limits, groups: Groups, heavy: int, target: int, least: int) -> Swap:
    """The swap that takes most off the load above the target, for its cost.

    One that adds copies is taken only if there is no other.
    """
    load = parts.load
    needed = load[heavy] - target
    best = breaking = Swap(heavy, NONE, 0, 0, 0, 0)
    value = value_of_breaking = 0.0
    partners = 0
    for taker in parts.by_load[:CANDIDATES]:
        headroom = target - load[taker]
        if headroom < least or partners == PARTNERS:
            break
        helps = False
        first, end = parts.start[heavy], parts.start[heavy] + parts.size[heavy]
        while first < end:
            after = _end_of_group(parts, groups, first, end)
            # From the last group of the taker to its first, and then nothing in return.
            begin, stop = parts.start[taker], parts.start[taker] + parts.size[taker]
            while stop >= begin:
                before = _start_of_group(parts, groups, begin, stop)
                difference, moved, amount = 0, 0, 0
                same = before < stop and _same_group(parts, groups, first, before)
                for count in range(1, 1 if same else after - first + 1):
                    given = parts.members[first + count - 1]
                    difference += parts.work[given]
                    amount += parts.tokens[given]
                    moved += _cost_of_move(groups, given, heavy, taker)
                    returned = min(count, stop - before)
                    if count <= returned:
                        back = parts.members[stop - count]
                        difference -= parts.work[back]
                        amount -= parts.tokens[back]
                        moved += _cost_of_move(groups, back, taker, heavy)
                    relief = min(difference, needed) - max(difference - headroom, 0)
                    if relief < least or not _fits(parts, limits, heavy, taker, count - returned, amount):
                        continue
                    helps = True
                    copies = _copies(parts, groups, heavy, first, after, count, taker)
                    if returned > 0:
                        copies += _copies(parts, groups, taker, before, stop, returned, heavy)
                    worth = relief / max(moved + copies, 1)
                    if copies > 0 and worth > value_of_breaking:
                        value_of_breaking = worth
                        breaking = Swap(heavy, taker, first, stop, count, returned)
                    elif copies <= 0 and worth > value:
                        value = worth
                        best = Swap(heavy, taker, first, stop, count, returned)
                stop = before if stop > begin else begin - 1
            first = after
        partners += helps
    return best if best.taker != NONE else breaking


def level_pools(
    work: np.ndarray, tokens: np.ndarray, part_of: np.ndarray, speeds: np.ndarray, limits: Limits, target: int
) -> None:
    """Changes `part_of`: pools each part above the target with some of the lightest, as few as needed, and
    places their samples anew, one by one."""
    num_parts, base = len(speeds), base_of(speeds, target)
    load = base + sum_per_part(work, part_of, num_parts)
    while load.max() > target:
        lightest, size = np.argsort(load, kind="mergesort"), 2
        while True:
            pool = np.append(lightest[: min(size, num_parts) - 1], lightest[-1])
            in_pool = np.full(num_parts, NONE)
            in_pool[pool] = np.arange(len(pool))
            samples = np.flatnonzero(in_pool[part_of] != NONE)
            samples = samples[np.argsort(-work[samples], kind="mergesort")]
            placed = refined_from_scratch(work[samples], tokens[samples], speeds[pool], limits, 0.0)
            fits = placed[-1] != NONE
            if fits and (base[pool] + sum_per_part(work[samples], placed, len(pool))).max() <= target:
                costs = Costs(in_pool[part_of[samples]], work[samples], np.zeros_like(pool))
                part_of[samples] = pool[nearest_home(placed, costs, speeds[pool])]
                break
            if size >= min(num_parts, MOST_IN_POOL):
                return
            size *= 2
        load = base + sum_per_part(work, part_of, num_parts)


@compiled
def join_groups(parts: Parts, limits: Limits, groups: Groups, target: int) -> None:
    """Makes swaps that save copies, where no part gets above the target."""
    for group in range(len(groups.of_copy)):
        first, end = groups.start[group], groups.start[group + 1]
        for sample in range(first, end):
            giver = parts.part_of[sample]
            for other in range(first, min(end, first + MOST_TO_JOIN)):
                taker = parts.part_of[other]
                if taker != giver:
                    found = _joining_swap(parts, limits, groups, target, giver, group, taker)
                    if found.taker != NONE:
                        _make(parts, found)
                        break


@compiled
def _joining_swap(
    parts: Parts, limits: Limits, groups: Groups, target: int, giver: int, group: int, taker: int
) -> Swap:
    """The swap that brings a group's samples in one part to another, and saves most; if any saves."""
    best, saved = Swap(giver, NONE, 0, 0, 0, 0), 0
    first, after = _place_of_group(parts, groups, giver, group)
    count = after - first
    given_work, given_tokens, given_moved = 0, 0, 0
    for at in range(first, after):
        given = parts.members[at]
        given_work += parts.work[given]
        given_tokens += parts.tokens[given]
        given_moved += _cost_of_move(groups, given, giver, taker)
    begin, stop = parts.start[taker], parts.start[taker] + parts.size[taker]
    while stop >= begin:
        before = _start_of_group(parts, groups, begin, stop)
        returned = min(count, stop - before)
        if returned == 0 or groups.group_of[parts.members[before]] != group:
            difference, amount, moved = given_work, given_tokens, given_moved
            for at in range(stop - returned, stop):
                back = parts.members[at]
                difference -= parts.work[back]
                amount -= parts.tokens[back]
                moved += _cost_of_move(groups, back, taker, giver)
            if (
                parts.load[taker] + difference <= target
                and parts.load[giver] - difference <= target
                and _fits(parts, limits, giver, taker, count - returned, amount)
            ):
                cost = moved + _copies(parts, groups, giver, first, after, count, taker)
                if returned > 0:
                    cost += _copies(parts, groups, taker, before, stop, returned, giver)
                if cost < saved:
                    saved = cost
                    best = Swap(giver, taker, first, stop, count, returned)
        stop = before if stop > begin else begin - 1
    return best


@compiled
def _make(parts: Parts, chosen: Swap) -> None:
    members = parts.members
    given = members[chosen.gives : chosen.gives + chosen.num_given].copy()
    returned = members[chosen.returns - chosen.num_returned : chosen.returns].copy()
    for at in range(chosen.num_given):
        back = returned[at] if at < chosen.num_returned else NONE
        swap(parts, chosen.giver, given[at], chosen.taker, back)


@njit(inline="always")
def _fits(parts: Parts, limits: Limits, giver: int, taker: int, rows: int, amount: int) -> bool:
    """Whether both parts keep to the limits, if so many rows and tokens change from one to the other."""
    if parts.size[giver] - rows < limits.fewest and rows > 0:
        return False
    if parts.size[taker] + rows > limits.most and rows > 0:
        return False
    if amount > 0:
        return parts.amount[taker] + amount <= limits.max_tokens
    return amount == 0 or parts.amount[giver] - amount <= limits.max_tokens


@njit(inline="always")
def _cost_of_move(groups: Groups, sample: int, source: int, to: int) -> int:
    home = groups.home[sample]
    return groups.of_move[sample] * ((source == home) - (to == home))


@compiled
def _copies(parts: Parts, groups: Groups, source: int, first: int, end: int, count: int, to: int) -> int:
    """The added cost of copies if `count` samples of the group at `first` to `end` move."""
    group = groups.group_of[parts.members[first]]
    cost = groups.of_copy[group]
    begin, stop = _place_of_group(parts, groups, to, group)
    return cost * ((begin == stop) - (count == end - first))


@compiled
def _place_of_group(parts: Parts, groups: Groups, part: int, group: int) -> tuple[int, int]:
    """Where the members of a group begin and end in a part; equal if there are none."""
    begin = _first_member(parts, part, groups.start[group])
    return begin, _first_member(parts, part, groups.start[group + 1])


@compiled
def _first_member(parts: Parts, part: int, sample: int) -> int:
    """The first position in a part whose sample is not below this one."""
    first, end = parts.start[part], parts.start[part] + parts.size[part]
    while first < end:
        middle = (first + end) // 2
        if parts.members[middle] < sample:
            first = middle + 1
        else:
            end = middle
    return first


@njit(inline="always")
def _same_group(parts: Parts, groups: Groups, one: int, other: int) -> bool:
    return groups.group_of[parts.members[one]] == groups.group_of[parts.members[other]]


@njit(inline="always")
def _end_of_group(parts: Parts, groups: Groups, first: int, end: int) -> int:
    group, at = groups.group_of[parts.members[first]], first
    while at < end and groups.group_of[parts.members[at]] == group:
        at += 1
    return at


@njit(inline="always")
def _start_of_group(parts: Parts, groups: Groups, begin: int, stop: int) -> int:
    """Where the group begins that ends before `stop`; `stop` itself at the start of the part."""
    at = stop
    if stop > begin:
        group = groups.group_of[parts.members[stop - 1]]
        while at > begin and groups.group_of[parts.members[at - 1]] == group:
            at -= 1
    return at
