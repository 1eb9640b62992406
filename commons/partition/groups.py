"""Parts that keep groups of samples together, at a price for each part that has samples of a group.

1. Divide groups into units: what is worth bringing together. Place them, the heaviest first and near home.
   Parts may be too full then.
2. Level parts by swaps of all that one has of a group; then of samples, at any price.
3. Reunite groups by exchanges of some samples of one for some of another, which pay for copies and moves and
   keep to the limits: even from samples that are dealt anew, few copies are left.
4. Send home what parts have of groups.

Home is another start where groups are together already. The cheapest result is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .kernels import (
    ALL,
    NO_CAP,
    NONE,
    Groups,
    Samples,
    bucket,
    place_units,
    reunite,
    settle,
    sum_per_part,
)
from .problem import Problem, heaviest_first
from .token_levels import keep_to_tokens, level_tokens
from .workloads import check_moves_per_copy, number_groups

# Where groups have at most this many copies each, on average, no other start is tried. With twice as many,
# users of four samples would end with 1.04 ranks each; with less than half, far more samples would move.
FEW_COPIES = 0.025
# What is found from home moves less than the rest. It is taken if it costs at most 1 ÷ this times as much.
NEAR_HOME = 0.93
# Units are placed whole up to this many times the target, and else cut.
OVERFULL_OF_EQUAL_ROWS, OVERFULL_OF_FREE_ROWS = (1.25, 1.0), (1.0, 1.25)
# Prices are divided by so many powers of two: with those of copies, and across nodes, they share a key with a
# number of a sample.
FEWER_BITS = 16


def bring_together(
    problem: Problem,
    samples: Samples,
    per_node: int,
    groups: ArrayLike,
    moves_per_copy: float,
    target: int,
    move: Callable[[], np.ndarray],
) -> np.ndarray | None:
    """int64 `[samples]`: as `move` returns it, with few groups in more than one part, and tokens leveled.

    None if no two samples belong together.
    """
    numbers = number_groups(groups, len(problem.work))
    copies = check_moves_per_copy(moves_per_copy)
    is_shared = np.bincount(numbers) > 1
    if not is_shared.any():
        return None
    samples = samples._replace(price=np.maximum(samples.price >> FEWER_BITS, 1))
    group_of = problem.sort(numbers)
    largest = np.zeros(len(is_shared), dtype=np.int64)
    np.maximum.at(largest, group_of, samples.price)
    copy = np.where(is_shared, np.rint(copies * largest), 0).astype(np.int64)
    room = np.zeros_like(copy)
    together = Groups(group_of, copy, room + NONE, room)
    per_node = per_node if per_node > 1 else problem.num_parts
    search = GroupSearch(problem, samples, together, int(is_shared.sum()), per_node)
    part_of = search.run(target)
    if not search.reaches(part_of, target):
        try:
            alone = move()
        except ValueError:  # none was found under the cap of tokens
            if problem.fault(part_of) is not None:
                raise
            alone = part_of
        attained = max(target, problem.time(alone))  # the target may be out of reach
        if attained > target and not search.reaches(part_of, attained):
            part_of = search.run(attained)
        if not search.reaches(part_of, attained):
            nearer = search.finish(alone.copy(), attained)
            part_of = nearer if search.reaches(nearer, attained) else alone
    search.level_tokens(part_of, target)
    return part_of


@dataclass(frozen=True)
class GroupSearch:
    """A search that keeps samples of a problem together; samples are in its order."""

    problem: Problem
    samples: Samples
    groups: Groups
    num_shared: int  # groups of more than one sample
    per_node: int

    def run(self, target: int) -> np.ndarray:
        """int64 `[samples]`: the cheapest result of all starts that reach the target, or come nearest."""
        best = self.samples.home.copy()
        best_rate, copies = self._rate(best, target)
        are_together = copies < 1
        for number, start in enumerate(self._starts(target, are_together)):
            part_of = self.finish(start, target)
            rate, copies = self._rate(part_of, target, NEAR_HOME if are_together and number == 0 else 1.0)
            if rate < best_rate:
                best, best_rate = part_of, rate
            if rate[:2] == (False, target) and copies <= FEW_COPIES:
                break
        return best

    def _rate(
        self, part_of: np.ndarray, target: int, share: float = 1.0
    ) -> tuple[tuple[bool, int, float], float]:
        """Rates a result, less being better, and counts the mean copies of groups of more than one sample.

        The rate is whether it has a fault, its time above the target, and `share` of the cost of its copies
        and moves.
        """
        _, group, _ = self._list_shares(part_of)
        cost = sum(self.groups.copy[group].tolist())  # which may exceed int64
        cost += int(self.samples.price[part_of != self.samples.home].sum())
        has_fault = self.problem.fault(part_of) is not None
        rate = (has_fault, max(self.problem.time(part_of), target), share * cost)
        return rate, (len(group) - len(self.groups.copy)) / self.num_shared

    def reaches(self, part_of: np.ndarray, target: int) -> bool:
        """Whether all parts keep to the limits, and none takes longer than the target."""
        return self.problem.fault(part_of) is None and self.problem.time(part_of) <= target

    def finish(self, part_of: np.ndarray, target: int) -> np.ndarray:
        """Levels `part_of`, which changes, brings groups together again, and returns it."""
        problem = self.problem
        self._level_units(part_of, target)
        samples = self.samples._replace(home=part_of.copy())
        keep_to_tokens(problem, samples, part_of, problem.num_parts)
        settle(samples, self.problem.limits(target, self.per_node), part_of, *ALL)
        if (part_of == NONE).any():  # under caps of tokens
            return samples.home
        attained = max(target, problem.time(part_of))
        reunite(self.samples, self.problem.limits(attained, self.per_node), self.groups, part_of)
        if problem.fault(part_of) is None:
            nearer = part_of.copy()
            self._level_units(nearer, attained)
            if self.reaches(nearer, attained):
                return nearer
        return part_of

    def _level_units(self, part_of: np.ndarray, target: int) -> None:
        """Changes `part_of` by swaps of what parts have of groups, to level parts and to bring them home.

        Such a share is at home where that saves most. Its rows are capped as tokens are.
        """
        problem, samples, num_parts = self.problem, self.samples, self.problem.num_parts
        share, _, part = self._list_shares(part_of)
        place, owner, home = list_shares(share, len(part), samples.home, num_parts)
        at_home = sum_per_part(samples.price, place, len(owner))
        is_own = home == part[owner]
        best = costliest(owner, 2 * at_home + is_own)
        price = at_home[best]
        price[owner[is_own]] -= np.where(is_own[best[owner[is_own]]], 0, at_home[is_own])
        home = home[best]
        limits = self.problem.limits(target, self.per_node)._replace(fewest=0, most=len(share))
        other = sum_per_part(problem.tokens, share, len(part))
        if problem.fewest > 0:
            limits, other = limits._replace(other=np.full(num_parts, problem.most)), np.bincount(share)
        work = sum_per_part(problem.work, share, len(part))
        order = heaviest_first(work)
        moved = part[order]
        shares = Samples(work[order], other[order], home[order], price[order])
        settle(shares, limits, moved, True, num_parts, NO_CAP)
        part[order] = moved
        part_of[:] = part[share]

    def level_tokens(self, part_of: np.ndarray, target: int) -> None:
        """As `token_levels.level_tokens`, and brings groups together again under the limits reached."""
        problem = self.problem
        if problem.token_tolerance is None:
            return
        before = part_of.copy()
        # Samples that are away may go elsewhere, at no cost.
        free = self.samples._replace(home=np.where(before == self.samples.home, before, NONE))
        level_tokens(problem, free, part_of, target, problem.num_parts)
        if not np.array_equal(before, part_of):
            most = sum_per_part(problem.tokens, part_of, problem.num_parts).max()
            limits = problem.limits(max(target, problem.time(part_of)), self.per_node)
            limits = limits._replace(other=np.full(problem.num_parts, most))
            reunite(self.samples, limits, self.groups, part_of)

    def _list_shares(self, part_of: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The share of each sample, what a part has of a group; the groups and parts of shares, sorted."""
        return list_shares(self.groups.of, len(self.groups.copy), part_of, self.problem.num_parts)

    def _starts(self, target: int, are_together: bool) -> Iterator[np.ndarray]:
        """Yields placements: home if groups are together there, and units that are cut in two ways."""
        home = self.samples.home
        starts: list[np.ndarray] = []
        if are_together:
            yield home.copy()
        unit_of = self._divide_into_units()
        by_home, _ = bucket(home, self.problem.num_parts)
        by_unit, ends = bucket(unit_of[by_home], int(unit_of.max()) + 1)
        work = sum_per_part(self.problem.work, unit_of, len(ends))
        order, limits = heaviest_first(work), self.problem.limits(target, self.per_node)
        for overfull in OVERFULL_OF_EQUAL_ROWS if self.problem.fewest > 0 else OVERFULL_OF_FREE_ROWS:
            start, most = np.full_like(home, NONE), (overfull * limits.load).astype(np.int64)
            place_units(self.samples, limits, most, start, by_home[by_unit], ends, order)
            if not any(np.array_equal(start, other) for other in starts):
                starts.append(start)
                yield start.copy()

    def _divide_into_units(self) -> np.ndarray:
        """int64 `[samples]`, the unit of each: a group, or what one home has if that costs more than a copy.

        Example: a copy costs 64. A group with 100 samples on one part, 70 on another, and 3 on a third, which
        cost 1 each, makes units of 103 and 70: the 3 join the 100.
        """
        share, group, _ = self._list_shares(self.samples.home)
        cost = sum_per_part(self.samples.price, share, len(group))
        joined = costliest(group, cost)[group]
        return np.where(cost > self.groups.copy[group], np.arange(len(cost)), joined)[share]


def list_shares(
    owner_of: np.ndarray, num_owners: int, part_of: np.ndarray, num_parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers the pairs of owner and part: for each sample, and the owner and the part of each pair, sorted.

    Example: owners [0, 1, 0, 0] in parts [1, 0, 1, 0] have shares (0, 0), (0, 1) and (1, 0): [1, 2, 1, 0].
    """
    by_part, _ = bucket(part_of, num_parts)
    order = by_part[bucket(owner_of[by_part], num_owners)[0]]
    owner, part = owner_of[order], part_of[order]
    is_first = (np.diff(owner, prepend=-1) != 0) | (np.diff(part, prepend=-1) != 0)
    share_of = np.empty_like(order)
    share_of[order] = np.cumsum(is_first) - 1
    return share_of, owner[is_first], part[is_first]


def costliest(owner: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """For each owner the first of its shares that cost most; owners ascend from 0, each with a share."""
    most = np.maximum.reduceat(cost, np.flatnonzero(np.diff(owner, prepend=-1)))
    best = np.flatnonzero(cost == most[owner])
    return best[np.flatnonzero(np.diff(owner[best], prepend=-1))]
