"""Pieces of samples that are too heavy for one part: each is a range of its sample's cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.partition.compiled import compiled
from commons.partition.search import NONE, grouped


@dataclass(frozen=True)
class Pieces:
    """Pieces in the order of their samples, and along each sample.

    Attributes:
        sample: int64 `[pieces]`, ascending; every sample has at least one piece.
        begin, end: int64 `[pieces]`, the cost of its sample before each piece and through it.
    """

    sample: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @property
    def costs(self) -> np.ndarray:
        """int64 `[pieces]`."""
        return self.end - self.begin


def divided(workloads: np.ndarray, size: int, heavy: np.ndarray, least: np.ndarray) -> Pieces:
    """Divides heavy samples into as few pieces of at most `size` as there can be.

    The first piece of a sample is the smallest, and the others cost the same. Where the cost of a token grows
    along a sample, later pieces then have the fewest tokens before them.

    Args:
        workloads: int64 `[samples]`.
        size: cost of a piece at most, as far as `least` allows.
        heavy: int64, the ascending samples to divide; the others stay whole.
        least: int64 `[len(heavy)]`, cost of a piece at least. Samples below twice that stay whole.
    """
    work = workloads[heavy]
    count = np.maximum(np.minimum(-(-work // max(size, 1)), work // np.maximum(least, 1)), 1)
    first = np.minimum(np.maximum(work - (count - 1) * size, least), work // count)
    per_sample = np.ones(len(workloads), dtype=np.int64)
    per_sample[heavy] = count
    sample = np.arange(len(workloads)).repeat(per_sample)
    begin, end = np.zeros_like(sample), workloads.take(sample)
    later = np.flatnonzero(sample[1:] == sample[:-1]) + 1
    owner = np.arange(len(heavy)).repeat(count - 1)
    number = np.arange(len(owner)) - (np.cumsum(count - 1) - (count - 1))[owner]
    begin[later] = first[owner] + number * ((work - first) // np.maximum(count - 1, 1))[owner]
    end[later - 1] = begin[later]
    return Pieces(sample, begin, end)


def leveled(
    pieces: Pieces,
    part_of: np.ndarray,
    loads: np.ndarray,
    least: np.ndarray,
    on_heavy: np.ndarray,
    most: int,
    goal: int,
) -> tuple[Pieces, np.ndarray]:
    """Cuts off what heavy parts have too much, and gives it to the lightest parts.

    Every cut brings a heavy part down to the goal or a light one up to it, so there are fewer cuts than
    parts. Source: McNaughton, "Scheduling with Deadlines and Loss Functions", 1959, for parts that hold whole
    samples already.

    Args:
        pieces: whole samples among them.
        part_of: int64 `[pieces]`, the part of each.
        loads: int64 `[parts]`.
        least: int64 `[len(on_heavy)]`, cost that both sides of a cut have at least.
        on_heavy: int64, the ascending pieces on parts above `most`.
        most: load of a part at most, as far as `least` allows.
        goal: load that these parts come down to, and others up to; at most `most`.

    Returns:
        The pieces after the cuts, and the part of each.
    """
    begin, end, part = pieces.begin.copy(), pieces.end.copy(), part_of.copy()
    of_heavy = begin[on_heavy], end[on_heavy], part[on_heavy]
    cut, *cut_off = _level(*of_heavy, least, loads.copy(), most, goal)
    begin[on_heavy], end[on_heavy], part[on_heavy] = of_heavy
    sample, begin, end, part = (
        np.concatenate(arrays)
        for arrays in zip(
            (pieces.sample, begin, end, part), (pieces.sample[on_heavy[cut]], *cut_off), strict=True
        )
    )
    order = np.lexsort((begin, sample))  # fast, as nearly all are in order
    return Pieces(sample[order], begin[order], end[order]), part[order]


@compiled
def _level(
    begin: np.ndarray,
    end: np.ndarray,
    part_of: np.ndarray,
    least: np.ndarray,
    loads: np.ndarray,
    most: int,
    goal: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Changes pieces to what stays of them; returns what is cut off: of which piece, its range, its part."""
    room_for = 2 * len(loads) + len(begin)
    of, to = np.empty(room_for, dtype=np.int64), np.empty(room_for, dtype=np.int64)
    new_begin, new_end = np.empty(room_for, dtype=np.int64), np.empty(room_for, dtype=np.int64)
    count = 0
    members, ends = grouped(part_of, len(loads))
    for heavy in np.argsort(-loads, kind="mergesort"):
        first = 0 if heavy == 0 else ends[heavy - 1]
        on_part = members[first : ends[heavy]]
        while loads[heavy] > most and count < room_for:
            light = np.argmin(loads)
            excess, room = loads[heavy] - goal, goal - loads[light]
            piece, amount = _best_cut(begin, end, part_of, least, on_part, heavy, excess, room)
            if piece == NONE:
                break
            loads[heavy] -= amount
            loads[light] += amount
            if amount == end[piece] - begin[piece]:
                part_of[piece] = light
                continue
            of[count], to[count] = piece, light
            if 2 * amount <= end[piece] - begin[piece]:  # the smaller side is the first
                new_begin[count], new_end[count] = begin[piece], begin[piece] + amount
                begin[piece] += amount
            else:
                new_begin[count], new_end[count] = end[piece] - amount, end[piece]
                end[piece] -= amount
            count += 1
    return of[:count], new_begin[:count], new_end[:count], to[:count]


@compiled
def _best_cut(
    begin: np.ndarray,
    end: np.ndarray,
    part_of: np.ndarray,
    least: np.ndarray,
    on_part: np.ndarray,
    part: int,
    excess: int,
    room: int,
) -> tuple[int, int]:
    """Finds the piece to cut, and how much of it to give away; NONE if none helps.

    It is the one that gives most of the excess; among these the one with the least cost before the cut, since
    those tokens are what the other side needs. A whole piece needs no cut.
    """
    best, given, relief, before = NONE, 0, 0, 0
    for piece in on_part:
        cost = end[piece] - begin[piece]
        if part_of[piece] != part:
            continue
        amount = min(max(min(excess, room), least[piece]), cost - least[piece])
        cut_at = begin[piece] + min(amount, cost - amount)
        if cost <= room and min(cost, excess) >= min(amount, excess):
            amount, cut_at = cost, 0
        elif amount < least[piece] or amount > room:
            continue
        helps = min(amount, excess)
        if helps > relief or (helps == relief and helps > 0 and cut_at < before):
            best, given, relief, before = piece, amount, helps, cut_at
    return best, given
