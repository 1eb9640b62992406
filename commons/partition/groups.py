"""Keeps groups of samples together. A group in n parts has n − 1 copies, each at a price.

1. Divide groups into units, which are samples worth bringing together. Place the units, the heaviest first
   and near home. Parts may be too full after that.
2. Level parts by swapping shares; a share is what one part has of a group. Then move samples, at any price.
3. Reunite groups by exchanging some samples of one for some of another. The exchanges save more than their
   moves cost, and keep to the limits. They leave few copies, even if step 2 scattered samples.
4. Send shares home.

If groups are together already, home is another start. The cheapest result wins.
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

# Once a result has at most this many copies per group, no other start is tried. At twice this, users with
# four samples would end on 1.04 ranks each. Below half of it, far more samples would move.
FEW_COPIES = 0.025
# Starting from home moves fewer samples. Its result wins unless another costs less than this times as much.
NEAR_HOME = 0.93
# Parts take whole units up to this multiple of their load limit, and divide the rest. Each value is one try.
OVERFULL_OF_EQUAL_ROWS, OVERFULL_OF_FREE_ROWS = (1.25, 1.0), (1.0, 1.25)
# Prices are shifted right by this many bits. Costs with copies, and across nodes, then fit into a key next to
# the number of a sample.
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
    """Returns each sample's part, int64 `[samples]`, with few groups in several parts and tokens leveled.

    Returns None if no two samples belong together. `move` makes a partition that ignores groups.
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
    per_node = per_node if per_node > 1 else problem.num_parts
    search = GroupSearch(problem, samples, Groups(group_of, copy), int(is_shared.sum()), per_node)
    part_of = search.run(target)
    if problem.time_within_limits(part_of) > target:
        try:
            alone = move()
        except ValueError:  # no partition was found under the token cap
            if problem.fault(part_of) is not None:
                raise
            alone = part_of
        attained = max(target, problem.time(alone))  # the target may be out of reach
        if attained > target and problem.time_within_limits(part_of) > attained:
            part_of = search.run(attained)
        if problem.time_within_limits(part_of) > attained:
            nearer = search.finish(alone.copy(), attained)
            part_of = nearer if problem.time_within_limits(nearer) <= attained else alone
    search.level_tokens(part_of, target)
    return part_of


@dataclass(frozen=True)
class GroupSearch:
    """A search for partitions that keep groups together. Samples are in the order of `problem`."""

    problem: Problem
    samples: Samples
    groups: Groups
    num_shared: int  # number of groups with more than one sample
    per_node: int

    def run(self, target: int) -> np.ndarray:
        """Returns the best partition, int64 `[samples]`: the cheapest within the target, else the fastest."""
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
        """Returns a rating of `part_of`, lower is better, and the mean copies of groups with several samples.

        The rating is (has a fault, the larger of time and target, `share` × the cost of copies and moves).
        """
        _, group, _ = self._list_shares(part_of)
        cost = sum(self.groups.copy[group].tolist())  # the sum may exceed int64
        cost += int(self.samples.price[part_of != self.samples.home].sum())
        has_fault = self.problem.fault(part_of) is not None
        rate = (has_fault, max(self.problem.time(part_of), target), share * cost)
        return rate, (len(group) - len(self.groups.copy)) / self.num_shared

    def finish(self, part_of: np.ndarray, target: int) -> np.ndarray:
        """Levels `part_of`, reunites groups, sends shares home, and returns the result. `part_of` changes."""
        problem = self.problem
        self._level_units(part_of, target)
        samples = self.samples._replace(home=part_of.copy())
        keep_to_tokens(problem, samples, part_of, problem.num_parts)
        settle(samples, self.problem.limits(target, self.per_node), part_of, *ALL)
        if (part_of == NONE).any():  # a token cap can leave samples without a part
            return samples.home
        attained = max(target, problem.time(part_of))
        reunite(self.samples, self.problem.limits(attained, self.per_node), self.groups, part_of)
        if problem.fault(part_of) is None:
            nearer = part_of.copy()
            self._level_units(nearer, attained)
            if problem.time_within_limits(nearer) <= attained:
                return nearer
        return part_of

    def _level_units(self, part_of: np.ndarray, target: int) -> None:
        """Changes `part_of` by swaps of whole shares, which level parts and send shares home.

        A share's home is the part where it saves most. With equal sizes, caps apply to rows, not tokens.
        """
        problem, samples, num_parts = self.problem, self.samples, self.problem.num_parts
        share, _, part = self._list_shares(part_of)
        # Each pair is a share and a home of its samples.
        place, owner, home_of_pair = list_shares(share, len(part), samples.home, num_parts)
        at_home = sum_per_part(samples.price, place, len(owner))
        is_own = home_of_pair == part[owner]
        best = costliest(owner, 2 * at_home + is_own)
        # The price is what the best home saves, less what the current part saves if it is another.
        price = at_home[best]
        price[owner[is_own]] -= np.where(is_own[best[owner[is_own]]], 0, at_home[is_own])
        home = home_of_pair[best]
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
        """Runs `token_levels.level_tokens`, then reunites groups within the limits that it reached."""
        problem = self.problem
        if problem.token_tolerance is None:
            return
        before = part_of.copy()
        # Samples that are already away from home may move on at no cost.
        free = self.samples._replace(home=np.where(before == self.samples.home, before, NONE))
        level_tokens(problem, free, part_of, target, problem.num_parts)
        if not np.array_equal(before, part_of):
            most = sum_per_part(problem.tokens, part_of, problem.num_parts).max()
            limits = problem.limits(max(target, problem.time(part_of)), self.per_node)
            limits = limits._replace(other=np.full(problem.num_parts, most))
            reunite(self.samples, limits, self.groups, part_of)

    def _list_shares(self, part_of: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the share of each sample, and the group and part of each share, in ascending order."""
        return list_shares(self.groups.of, len(self.groups.copy), part_of, self.problem.num_parts)

    def _starts(self, target: int, are_together: bool) -> Iterator[np.ndarray]:
        """Yields starting placements: home if groups are together there, and one or two by `place_units`."""
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
        """Returns each sample's unit, int64 `[samples]`: its group, or a share that costs more than a copy.

        Example: a copy costs 64, and each move 1. A group with 100 samples in one part, 70 in another, and 3
        in a third makes units of 103 and 70, because the 3 join the 100.
        """
        share, group, _ = self._list_shares(self.samples.home)
        cost = sum_per_part(self.samples.price, share, len(group))
        joined = costliest(group, cost)[group]
        return np.where(cost > self.groups.copy[group], np.arange(len(cost)), joined)[share]


def list_shares(
    owner_of: np.ndarray, num_owners: int, part_of: np.ndarray, num_parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers (owner, part) pairs in order. Returns each sample's pair, and each pair's owner and part.

    Example: owners [0, 1, 0, 0] in parts [1, 0, 1, 0] make the pairs (0, 0), (0, 1), and (1, 0). The samples
    have pairs [1, 2, 1, 0].
    """
    by_part, _ = bucket(part_of, num_parts)
    order = by_part[bucket(owner_of[by_part], num_owners)[0]]
    owner, part = owner_of[order], part_of[order]
    is_first = (np.diff(owner, prepend=-1) != 0) | (np.diff(part, prepend=-1) != 0)
    share_of = np.empty_like(order)
    share_of[order] = np.cumsum(is_first) - 1
    return share_of, owner[is_first], part[is_first]


def costliest(owner: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Returns the costliest share of each owner, the first if tied. `owner` ascends from 0 without gaps."""
    most = np.maximum.reduceat(cost, np.flatnonzero(np.diff(owner, prepend=-1)))
    best = np.flatnonzero(cost == most[owner])
    return best[np.flatnonzero(np.diff(owner[best], prepend=-1))]
