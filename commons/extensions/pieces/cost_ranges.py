"""Cuts samples to level the loads of parts. Each piece is a range of its sample's cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...partition.compiled import compiled, inner
from ...partition.kernels import NONE, bucket


@dataclass(frozen=True)
class CostRanges:
    """Pieces as ranges of cost, in the order of their samples, and in order along each sample."""

    sample: np.ndarray  # int64 [pieces], ascending samples; every sample has at least one piece
    begin: np.ndarray  # int64 [pieces], cost of the sample before each piece
    end: np.ndarray  # int64 [pieces], cost of the sample through each piece

    @property
    def costs(self) -> np.ndarray:
        """The cost of each piece, int64 `[pieces]`."""
        return self.end - self.begin


def cut_heavy(
    workloads: np.ndarray, size: int, heavy: np.ndarray, least_first: np.ndarray, least: np.ndarray
) -> CostRanges:
    """Cuts heavy samples into as few pieces of at most `size` as possible.

    The first piece of a sample is the smallest, and the others cost the same. If the cost of a token grows
    along the sample, this leaves the fewest tokens before the later pieces.

    Example: with a size of 40, a sample of 100 becomes pieces of 20, 40, and 40.

    `workloads` is int64 `[samples]`, and `heavy` lists the samples to cut, ascending. Even if `size` is less,
    a first piece costs at least `least_first` (or an equal share, if that is less), and any other at least
    `least`, int64 `[len(heavy)]` each. A sample that costs less than twice `least` stays whole.
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
    """The pieces on heavy parts, int64 `[pieces]` each. Cuts change them in place."""

    begin: np.ndarray
    end: np.ndarray
    part_of: np.ndarray
    least_first: np.ndarray  # least cost of a sample's first piece
    least: np.ndarray  # least cost of any other piece


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
    """Cuts off the excess of heavy parts, and gives it to the lightest parts.

    Every cut brings a heavy part down to the goal or a light one up to it, so there are fewer cuts than
    parts. Source: McNaughton, "Scheduling with Deadlines and Loss Functions", 1959. There, parts start empty.

    Example: loads are 130, 90, and 80, and the goal is 100. The first part gives 20 of a sample to the last,
    and then 10 to the second.

    Args:
        pieces, part_of: pieces or whole samples, and the part of each, int64 `[pieces]`, as in the result.
        loads: load of each part, int64 `[parts]`, initial loads included.
        least_first, least: least costs of pieces, int64 `[len(on_heavy)]`, as for `cut_heavy`.
        on_heavy: pieces on parts above `most`, int64, ascending.
        most, goal: largest load of a part, as far as `least` allows, and load to which heavy parts come down.
    """
    begin, end, part = pieces.begin.copy(), pieces.end.copy(), part_of.copy()
    heavy = _Cuttable(begin[on_heavy], end[on_heavy], part[on_heavy], least_first, least)
    fullest_first = np.argsort(-loads, kind="stable")
    cut_off = _level(heavy, loads.copy(), *bucket(heavy.part_of, len(loads)), fullest_first, most, goal)
    begin[on_heavy], end[on_heavy], part[on_heavy] = heavy[:3]
    sample = np.append(pieces.sample, pieces.sample[on_heavy[cut_off[0]]])
    begin, end, part = np.append(begin, cut_off[1]), np.append(end, cut_off[2]), np.append(part, cut_off[3])
    order = np.lexsort((begin, sample))  # fast, because nearly all are in order already
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
    """Shrinks or moves pieces in place. Returns the cuts, int64 `[4, cuts]`: (piece, begin, end, new part).
    `members` lists the pieces part by part, and `ends` holds the end of each part's pieces in it."""
    begin, end, part_of = pieces.begin, pieces.end, pieces.part_of
    cuts, count = np.empty((4, 2 * len(loads) + len(begin)), dtype=np.int64), 0
    for heavy in fullest_first:
        on_part = members[(0 if heavy == 0 else ends[heavy - 1]) : ends[heavy]]
        while loads[heavy] > most and count < cuts.shape[1]:
            # 1. Find the range that relieves the part most, for the lightest part to take.
            light = np.argmin(loads)
            on_part = on_part[part_of[on_part] == heavy]
            excess, room = loads[heavy] - goal, most - loads[light]
            wanted = min(excess, goal - loads[light])
            piece, first, last = _find_cut(pieces, on_part, wanted, excess, room)
            if piece == NONE:
                break
            # 2. Give away the range: a whole piece, or the front or back of one.
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
    """Returns the (piece, begin, end) that a heavy part gives away, or NONE as the piece if nothing helps.

    The range, which may be a whole piece, removes the most excess. Ties go to the least cost before the cut,
    because the later piece fetches tokens before it. A cut gives away `wanted`, as far as least costs allow.
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
