"""Samples in parts, as the compiled searches see and change them.

Samples are numbered from the heaviest down: comparing numbers compares workloads, and ties are broken.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from commons.partition.compiled import compiled

NONE = -1  # in place of a sample, a part or a position


class Limits(NamedTuple):
    """What every part has to keep to.

    Attributes:
        fewest, most: samples of a part.
        max_tokens: sum of a part's tokens.
    """

    fewest: int
    most: int
    max_tokens: int


class Parts(NamedTuple):
    """A partition; all arrays are int64.

    Attributes:
        work: `[samples]`, descending.
        tokens: `[samples]`.
        base: `[parts]`, load that a part has without any sample.
        part_of: `[samples]`.
        members: the samples of part p, ascending, from `start[p]` on; behind them is room for more.
        start, room, size: `[parts]`, of `members`.
        load, amount: `[parts]`, sums of work, with `base`, and of tokens.
        by_load: `[parts]`, the lightest part first; of equally light ones that with the smaller index.
        place: `[parts]`, of each part in `by_load`.
    """

    work: np.ndarray
    tokens: np.ndarray
    base: np.ndarray
    part_of: np.ndarray
    members: np.ndarray
    start: np.ndarray
    room: np.ndarray
    size: np.ndarray
    load: np.ndarray
    amount: np.ndarray
    by_load: np.ndarray
    place: np.ndarray


@compiled
def make_parts(work: np.ndarray, tokens: np.ndarray, part_of: np.ndarray, base: np.ndarray) -> Parts:
    """The parts of a given partition, `part_of` saying the part of each sample; it is changed with them."""
    num_parts = len(base)
    members = np.empty(2 * len(work) + 4 * num_parts, dtype=np.int64)  # what _lay_out needs
    zeros = np.zeros((7, num_parts), dtype=np.int64)
    start, room, size, load, amount = zeros[0], zeros[1], zeros[2], zeros[3], zeros[4]
    parts = Parts(work, tokens, base, part_of, members, start, room, size, load, amount, zeros[5], zeros[6])
    refill(parts)
    return parts


@compiled
def refill(parts: Parts) -> None:
    """Makes everything agree with `part_of` again."""
    load, amount = parts.load, parts.amount
    load[:] = parts.base
    amount[:] = 0
    for sample in range(len(parts.work)):
        load[parts.part_of[sample]] += parts.work[sample]
        amount[parts.part_of[sample]] += parts.tokens[sample]
    parts.by_load[:] = np.argsort(load, kind="mergesort")
    for i in range(len(load)):
        parts.place[parts.by_load[i]] = i
    _lay_out(parts)


@compiled
def _lay_out(parts: Parts) -> None:
    """Writes `members` and sizes anew from `part_of`, with room for every part to double."""
    size, start, room, part_of, members = parts.size, parts.start, parts.room, parts.part_of, parts.members
    size[:] = 0
    for sample in range(len(part_of)):
        size[part_of[sample]] += 1
    end = 0
    for part in range(len(size)):
        start[part] = end
        room[part] = 2 * size[part] + 4
        end += room[part]
        size[part] = 0
    for sample in range(len(part_of)):
        part = part_of[sample]
        members[start[part] + size[part]] = sample
        size[part] += 1


@compiled
def exchange(parts: Parts, giver: int, gives: int, taker: int, returns: int) -> None:
    """Moves sample `gives` from part `giver` to part `taker`, and `returns` back unless it is NONE."""
    if returns == NONE and parts.size[taker] == parts.room[taker]:
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
    """Whether that exchange keeps both parts within `limits.max_tokens`."""
    change = parts.tokens[gives] - (parts.tokens[returns] if returns != NONE else 0)
    if change > 0:
        return parts.amount[taker] + change <= limits.max_tokens
    return change == 0 or parts.amount[giver] - change <= limits.max_tokens


@compiled
def first_at_most(work: np.ndarray, start: int, value: int) -> int:
    """The first sample from `start` on whose work is at most `value`; the number of samples if none is."""
    left = len(work) - start
    while left > 1:  # without a branch, which the processor would mispredict every other time
        half = left // 2
        start += half * (work[start + half - 1] > value)
        left -= half
    return start + (left == 1 and work[start] > value)


@compiled
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


@compiled
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


@compiled
def _reorder(parts: Parts, part: int) -> None:
    """Puts a part whose load has changed where it belongs in `by_load`."""
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
