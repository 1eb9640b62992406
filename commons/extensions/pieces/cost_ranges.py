"""Pieces of samples that are too heavy for one part: each is a range of its sample's cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...partition.compiled import compiled, inner
from ...partition.kernels import NONE, bucket


@dataclass(frozen=True)
class CostRanges:
    """Pieces in the order of their samples, and along each sample."""

    sample: np.ndarray  # int64 [pieces], ascending; every sample has at least one piece
    begin: np.ndarray  # int64 [pieces], the cost of its sample before each piece
    end: np.ndarray  # int64 [pieces], and through it

    @property
    def costs(self) -> np.ndarray:
        """int64 `[pieces]`."""
        return self.end - self.begin


def cut_heavy(
    workloads: np.ndarray, size: int, heavy: np.ndarray, least_first: np.ndarray, least: np.ndarray
) -> CostRanges:
    """Cuts samples, int64 `[samples]`, that are heavy into as few pieces of at most `size` as there can be.

    The first piece of a sample is the smallest, and the others cost the same. Where the cost of a token grows
    along a sample, later pieces then have the fewest tokens before them.

    Example: with a size of 40, a sample of 100 becomes pieces of 20, 40, and 40.

    `heavy` are the ascending samples to cut. Their first piece costs at least `least_first`, and any other
    `least`, int64 `[len(heavy)]`, whatever the size. Samples of less than twice the latter stay whole.
    """
    work = workloads[heavy]
    count = np.maximum(np.minimum(-(-work // max(size, 1)), work // np.maximum(least, 1)), 1)
    first = np.minimum(np.maximum(work - (count - 1) * size, least_first), work // count)
    per_sample = np.ones(len(workloads), dtype=np.int64)
    per_sample[heavy] = count
    sample = np.arange(len(workloads)).repeat(per_sample)
    begin, end = np.zeros_like(sample), workloads.take(sample)
    later = np.flatnonzero(sample[1:] == sample[:-1]) + 1
    owner = np.arange(len(heavy)).repeat(count - 1)
    number = np.arange(len(owner)) - (np.cumsum(count - 1) - (count - 1))[owner]
    begin[later] = first[owner] + number * ((work - first) // np.maximum(count - 1, 1))[owner]
    end[later - 1] = begin[later]
    return CostRanges(sample, begin, end)


class _Cuttable(NamedTuple):
    """CostRanges on heavy parts, int64 `[pieces]` each, which cuts change."""

    begin: np.ndarray
    end: np.ndarray
    part_of: np.ndarray
    least_first: np.ndarray  # cost that a piece has at least, if it is the first of its sample
    least: np.ndarray  # and that any other has


def level(
    pieces: CostRanges,
    part_of: np.ndarray,
    loads: np.ndarray,
    least_first: np.ndarray,
    least: np.ndarray,
    on_heavy: np.ndarray,
    most: int,
    goal: int,
) -> tuple[CostRanges, np.ndarray]:
    """Cuts off what heavy parts have too much, and gives it to the lightest parts.

    Every cut brings a heavy part down to the goal or a light one up to it, so there are fewer cuts than
    parts. Source: McNaughton, "Scheduling with Deadlines and Loss Functions", 1959, for parts that hold whole
    samples already.

    Example: loads are 130, 90, and 80, and the goal is 100. The first part gives 20 of a sample to the last,
    and then 10 to the second.

    Args:
        pieces, part_of: whole samples among them, and int64 `[pieces]`, the part of each; so is the result.
        loads: int64 `[parts]`, initial loads included.
        least_first, least: int64 `[len(on_heavy)]`, as for `cut_heavy`.
        on_heavy: int64, the ascending pieces on parts above `most`.
        most, goal: load that a part has at most, as far as `least` allows, and that these parts come down to.
    """
    begin, end, part = pieces.begin.copy(), pieces.end.copy(), part_of.copy()
    heavy = _Cuttable(begin[on_heavy], end[on_heavy], part[on_heavy], least_first, least)
    fullest_first = np.argsort(-loads, kind="stable")
    cut_off = _level(heavy, loads.copy(), *bucket(heavy.part_of, len(loads)), fullest_first, most, goal)
    begin[on_heavy], end[on_heavy], part[on_heavy] = heavy[:3]
    sample = np.append(pieces.sample, pieces.sample[on_heavy[cut_off[0]]])
    begin, end, part = np.append(begin, cut_off[1]), np.append(end, cut_off[2]), np.append(part, cut_off[3])
    order = np.lexsort((begin, sample))  # fast, as nearly all are in order
    return CostRanges(sample[order], begin[order], end[order]), part[order]


@compiled
def _level(
    pieces: _Cuttable,
    loads: np.ndarray,
    members: np.ndarray,
    ends: np.ndarray,
    fullest_first: np.ndarray,
    most: int,
    goal: int,
) -> np.ndarray:
    """Changes pieces to what stays of them; returns int64 `[4, cuts]`: (piece, begin, end, part).

    `members` are pieces by part, and `ends` is where each part's end.
    """
    begin, end, part_of = pieces.begin, pieces.end, pieces.part_of
    cuts, count = np.empty((4, 2 * len(loads) + len(begin)), dtype=np.int64), 0
    for heavy in fullest_first:
        on_part = members[(0 if heavy == 0 else ends[heavy - 1]) : ends[heavy]]
        while loads[heavy] > most and count < cuts.shape[1]:
            # 1. Find what takes most off the part, for the lightest one.
            light = np.argmin(loads)
            on_part = on_part[part_of[on_part] == heavy]
            excess, room = loads[heavy] - goal, most - loads[light]
            wanted = min(excess, goal - loads[light])
            piece, first, last = _find_cut(pieces, on_part, wanted, excess, room)
            if piece == NONE:
                break
            # 2. Give it: a whole piece, or what is cut off its front or its back.
            loads[heavy] -= last - first
            loads[light] += last - first
            if first == begin[piece] and last == end[piece]:
                part_of[piece] = light
                continue
            cuts[0, count], cuts[1, count], cuts[2, count], cuts[3, count] = piece, first, last, light
            count += 1
            if first == begin[piece]:
                begin[piece] = last
            else:
                end[piece] = first
    return cuts[:, :count]


@inner
def _find_cut(
    pieces: _Cuttable, on_part: np.ndarray, wanted: int, excess: int, room: int
) -> tuple[int, int, int]:
    """(piece, begin, end) that a heavy part gives away, maybe all of a piece; NONE if nothing helps.

    It takes most of the excess, with the least cost before the cut: the tokens there are what the other side
    needs. A cut gives away what is wanted, or as little more as there has to be.
    """
    best, first, last, relief, before = NONE, 0, 0, 0, 0
    for piece in on_part:
        begin, end, least = pieces.begin[piece], pieces.end[piece], pieces.least[piece]
        cost, least_front = end - begin, pieces.least_first[piece] if begin == 0 else least
        front = min(max(wanted, least_front), cost - least)
        back = min(max(wanted, least), cost - least_front)
        for amount, at_least, is_front, cut_at in (
            (cost, 0, 1, 0),
            (front, least_front, 1, begin + front),
            (back, least, 0, end - back),
        ):
            helps = min(amount, excess)
            if amount < at_least or amount > room or helps < max(relief, 1):
                continue
            if helps > relief or cut_at < before:
                best, relief, before = piece, helps, cut_at
                first = begin if is_front else end - amount
                last = first + amount
    return best, first, last
