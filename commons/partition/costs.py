"""Costs of a placement: samples away from home, and copies of groups, counted while samples move.

A group in several parts has copies: each of these parts looks its ids up. A part that gets the first sample
of a group pays for a copy, and one that gives its last sample away saves one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from .compiled import inner
from .parts import NONE, Parts, swap

# A byte to another node costs as much as this many bytes within one: nodes are left last.
ACROSS_NODES = 1000
# Swaps looked at: this many × samples × the logarithm of their number. Then a search takes what it has. For
# groups it starts several times.
LOOKS, LOOKS_FOR_GROUPS = 16, 64


class Copies(NamedTuple):
    """Slots, one for each part with samples of a group, by group and ascending part; all int64."""

    group_of: np.ndarray  # [samples], NONE for a sample without others
    cost: np.ndarray  # [groups], of each part with samples of the group, beyond the first
    start: np.ndarray  # [groups + 1], the first slot of each group
    used: np.ndarray  # [groups], slots in use
    part: np.ndarray  # [slots]
    samples: np.ndarray  # [slots], how many samples of the group the part has


class Costs(NamedTuple):
    """Costs of having a sample away from home, and from its group; all int64."""

    home: np.ndarray  # [samples], the part that each is in at first
    to_move: np.ndarray  # [samples], the cost of each when it moves
    node_of: np.ndarray  # [parts], ascending
    looks: np.ndarray  # [2], swaps looked at so far, and how many may be; all searches of a plan share it
    copies: Copies  # of groups; there are none where all samples may move alone

    def allow_looks(self, looks: int) -> None:
        """Lets searches look at `looks` × n × log2(n) more swaps of n samples."""
        count = len(self.home)
        self.looks[1] = self.looks[0] + looks * count * max(count.bit_length(), 1)


def price_moves(home: np.ndarray, to_move: np.ndarray, node_of: np.ndarray) -> Costs:
    """Makes the costs of samples that belong to no groups; arrays as in `Costs`."""
    costs = Costs(home, to_move, node_of, np.zeros(2, dtype=np.int64), no_copies(len(home)))
    costs.allow_looks(LOOKS)
    return costs


def make_copies(group_of: np.ndarray, cost: np.ndarray) -> Copies:
    """Makes room for the samples of groups in parts, which searches count; arrays as in `Copies`."""
    start = np.zeros(len(cost) + 1, dtype=np.int64)
    np.cumsum(np.bincount(group_of[group_of != NONE], minlength=len(cost)), out=start[1:])
    slots = np.zeros((2, start[-1]), dtype=np.int64)
    return Copies(group_of, cost, start, np.zeros_like(cost), slots[0], slots[1])


def no_copies(num_samples: int) -> Copies:
    """The copies of samples that may all move alone."""
    return make_copies(np.full(num_samples, NONE), np.zeros(0, dtype=np.int64))


@inner
def count_copies(copies: Copies, part_of: np.ndarray) -> None:
    """Counts the samples of groups in parts; `part_of` is int64 `[samples]`."""
    if len(copies.cost) == 0:
        return
    for group in range(len(copies.used)):
        copies.used[group] = 0
    for sample in range(len(part_of)):
        _count(copies, sample, part_of[sample], 1)


@inner
def _find_slot(copies: Copies, group: int, part: int) -> int:
    """The group's first slot whose part is not below this one."""
    first, end = copies.start[group], copies.start[group] + copies.used[group]
    while first < end:
        middle = (first + end) // 2
        if copies.part[middle] < part:
            first = middle + 1
        else:
            end = middle
    return first


@inner
def count_samples(copies: Copies, group: int, part: int) -> int:
    """How many samples of the group the part has."""
    slot = _find_slot(copies, group, part)
    has_some = slot < copies.start[group] + copies.used[group] and copies.part[slot] == part
    return copies.samples[slot] if has_some else 0


@inner
def _count(copies: Copies, sample: int, part: int, change: int) -> None:
    """Counts a sample that the part gets, or gives away with a change of −1."""
    group = copies.group_of[sample]
    if group == NONE:
        return
    slot, end = _find_slot(copies, group, part), copies.start[group] + copies.used[group]
    if slot == end or copies.part[slot] != part:  # the first sample opens a slot
        for at in range(end, slot, -1):
            copies.part[at], copies.samples[at] = copies.part[at - 1], copies.samples[at - 1]
        copies.part[slot], copies.samples[slot] = part, 0
        copies.used[group] += 1
    copies.samples[slot] += change
    if copies.samples[slot] == 0:  # the last one closes it
        for at in range(slot, end - 1):
            copies.part[at], copies.samples[at] = copies.part[at + 1], copies.samples[at + 1]
        copies.used[group] -= 1


@inner
def swap_and_count(parts: Parts, copies: Copies, giver: int, gives: int, taker: int, returns: int) -> None:
    """`swap`, which also counts the samples of groups in parts."""
    swap(parts, giver, gives, taker, returns)
    _count(copies, gives, giver, -1)
    if returns != NONE:
        _count(copies, returns, taker, -1)
        _count(copies, returns, giver, 1)
    _count(copies, gives, taker, 1)


@inner
def copying_cost(copies: Copies, sample: int, source: int, to: int) -> int:
    """The cost of copies that moving the sample adds: negative if it joins others, and leaves none."""
    group = copies.group_of[sample]
    if group == NONE:
        return 0
    is_first = count_samples(copies, group, to) == 0
    is_last = count_samples(copies, group, source) == 1
    return copies.cost[group] * (int(is_first) - int(is_last))


@njit(inline="always")
def moving_cost(costs: Costs, sample: int, source: int, to: int) -> int:
    """The cost of moving the sample from one part to another; negative on the way home, 0 for NONE."""
    if sample == NONE:
        return 0
    return _cost_in(costs, sample, to) - _cost_in(costs, sample, source)


@njit(inline="always")
def _cost_in(costs: Costs, sample: int, part: int) -> int:
    home = costs.home[sample]
    if part == home:
        return 0
    return costs.to_move[sample] * (1 if costs.node_of[part] == costs.node_of[home] else ACROSS_NODES)


@inner
def returning_cost(costs: Costs, sample: int, copied: int, giver: int, taker: int, returned: int) -> int:
    """The cost of copies of a swap, and of moving the sample returned; `copied` is that of the other."""
    if returned == NONE:
        return copied
    moved = moving_cost(costs, returned, taker, giver)
    group = costs.copies.group_of[returned]
    if group != NONE and group == costs.copies.group_of[sample]:
        return moved  # each takes the other's place
    return copied + moved + copying_cost(costs.copies, returned, taker, giver)
