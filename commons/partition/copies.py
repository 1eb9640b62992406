"""Copies of groups: the parts that have samples of each, counted while samples move.

A group in several parts has copies: each of these parts looks its ids up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compiled import compiled, inner
from .search import NONE, Parts, swap


class Copies(NamedTuple):
    """Groups of samples, and the parts that have some of each; all int64.

    Attributes:
        group_of: `[samples]`, NONE for a sample without others.
        of_copy: `[groups]`, the cost of each part with samples of the group, beyond the first.
        start: `[groups + 1]`, the first slot of each group.
        used: `[groups]`, slots in use, ascending by part: one for each part with samples of the group.
        part, samples: `[slots]`, a part, and how many samples of the group it has.
    """

    group_of: np.ndarray
    of_copy: np.ndarray
    start: np.ndarray
    used: np.ndarray
    part: np.ndarray
    samples: np.ndarray


def copies_of(group_of: np.ndarray, of_copy: np.ndarray, part_of: np.ndarray) -> Copies:
    """Counts samples of groups in parts, `part_of` int64 `[samples]`; other arrays as in `Copies`."""
    num_groups = len(of_copy)
    start = np.zeros(num_groups + 1, dtype=np.int64)
    np.cumsum(np.bincount(group_of[group_of != NONE], minlength=num_groups), out=start[1:])
    slots = np.zeros((2, start[-1]), dtype=np.int64)
    copies = Copies(group_of, of_copy, start, np.zeros(num_groups, dtype=np.int64), slots[0], slots[1])
    _add_all(copies, part_of)
    return copies


@compiled
def _add_all(copies: Copies, part_of: np.ndarray) -> None:
    for sample in range(len(part_of)):
        add_to_group(copies, sample, part_of[sample])


@inner
def _slot_of(copies: Copies, group: int, part: int) -> int:
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
def samples_in(copies: Copies, group: int, part: int) -> int:
    """How many samples of the group the part has."""
    slot = _slot_of(copies, group, part)
    has_some = slot < copies.start[group] + copies.used[group] and copies.part[slot] == part
    return copies.samples[slot] if has_some else 0


@inner
def add_to_group(copies: Copies, sample: int, part: int) -> None:
    """Counts a sample that the part gets."""
    group = copies.group_of[sample]
    if group == NONE:
        return
    slot, end = _slot_of(copies, group, part), copies.start[group] + copies.used[group]
    if slot == end or copies.part[slot] != part:
        for at in range(end, slot, -1):
            copies.part[at], copies.samples[at] = copies.part[at - 1], copies.samples[at - 1]
        copies.part[slot], copies.samples[slot] = part, 0
        copies.used[group] += 1
    copies.samples[slot] += 1


@inner
def remove_from_group(copies: Copies, sample: int, part: int) -> None:
    """Counts a sample that the part gives away."""
    group = copies.group_of[sample]
    if group == NONE:
        return
    slot = _slot_of(copies, group, part)
    copies.samples[slot] -= 1
    if copies.samples[slot] == 0:
        copies.used[group] -= 1
        for at in range(slot, copies.start[group] + copies.used[group]):
            copies.part[at], copies.samples[at] = copies.part[at + 1], copies.samples[at + 1]


@inner
def swap_counted(parts: Parts, copies: Copies, giver: int, gives: int, taker: int, returns: int) -> None:
    """`swap`, which also counts the samples of groups in parts."""
    swap(parts, giver, gives, taker, returns)
    remove_from_group(copies, gives, giver)
    if returns != NONE:
        remove_from_group(copies, returns, taker)
        add_to_group(copies, returns, giver)
    add_to_group(copies, gives, taker)


@inner
def copies_added(copies: Copies, sample: int, source: int, to: int) -> int:
    """The cost of copies that moving the sample adds: negative if it joins others, and leaves none."""
    group = copies.group_of[sample]
    if group == NONE:
        return 0
    is_first = samples_in(copies, group, to) == 0
    is_last = samples_in(copies, group, source) == 1
    return copies.of_copy[group] * (int(is_first) - int(is_last))
