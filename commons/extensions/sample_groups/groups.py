"""Rebalancing that keeps groups of samples together. A group in n parts has n − 1 copies, each at a price.

1. Divide groups into units, which are samples worth bringing together. Place the units, the heaviest first
   and near home. Parts may be too full after that.
2. Level parts by swapping shares; a share is what one part has of a group. Then move samples, at any price.
3. Reunite groups by exchanging some samples of one for some of another. The exchanges save more than their
   moves cost, and keep to the limits. They leave few copies, even if step 2 scattered samples.
4. Send shares home.

If groups are together already, home is another start. The cheapest result wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ...partition.kernels import NO_CAP, NONE, Samples, bucket, level, settle, sum_per_part
from ...partition.problem import Problem, heaviest_first, in_lists
from ...partition.rebalance import FromHome
from ...partition.token_levels import keep_to_tokens, level_tokens
from .kernels import Groups, place_units, reunite

# Name of the column with each row's group, int64, negative for none. Partitioners take it by this name.
COLUMN = "groups"
# An embedding of 128 float32 travels once as a value and once as a gradient: 1,024 bytes per id. Moving a
# sample sends 16 bytes per id, its item and its action. With a larger maximum, sums of prices could overflow.
MOVES_PER_COPY, MOST_MOVES = 64.0, 1000.0
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


@in_lists
def rebalance_groups(
    workloads: ArrayLike,
    home: ArrayLike,
    num_partitions: int,
    tolerance: float = 0.01,
    sizes: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    *,
    groups: ArrayLike | None = None,
    moves_per_copy: float = MOVES_PER_COPY,
    equal_size: bool = True,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
    speeds: ArrayLike | None = None,
    token_tolerance: float | None = None,
) -> np.ndarray:
    """Balances parts as `rebalance` does, with the same other arguments, and brings groups together.

    Provisional: may change in a minor version.

    Args:
        groups: Group label of each sample, integers, `[samples]`. A group comes together in one part if the
            tolerance and the limits allow it. A sample with a negative label has no group. With groups,
            `ranks_per_node` matters less, and `token_tolerance` also moves others of the groups.
        moves_per_copy: Value of having a group in one part fewer, in moves of its largest sample. It is the
            bytes of embeddings that ranks exchange per id ÷ the bytes of a sample per id. A group with more
            samples than this in each of its parts may stay in several parts.

    Returns:
        Indices of the samples of each part, int64, ascending. The balance is within the tolerance, or no
        worse than without groups. If no two samples belong together, the result is that of `rebalance`.

    Raises:
        ValueError: `rebalance` rejects an argument; `groups` is not one integer for each sample; or
            `moves_per_copy` is not from 0 to 1000.
    """
    problem = Problem.of(workloads, num_partitions, equal_size, tokens, max_tokens, speeds, token_tolerance)
    start = FromHome.of(problem, home, tolerance, sizes, ranks_per_node)
    together = None if groups is None else _bring_together(start, groups, moves_per_copy)
    return start.parts() if together is None else problem.unsort(together)


def compile_search() -> None:
    """Compiles the search that places groups, or loads it from numba's cache."""
    work, home = np.array([2, 5, 7, 2, 5, 1, 5]), np.array([1, 0, 0, 1, 0, 0, 0])
    rebalance_groups(work, home, 2, tolerance=0.0, groups=0 * home)


def _bring_together(start: FromHome, groups: ArrayLike, moves_per_copy: float) -> np.ndarray | None:
    """Returns each sample's part, int64 `[samples]`, with few groups in several parts and tokens leveled.
    Returns None if no two samples belong together."""
    problem, samples, target = start.problem, start.samples, start.target
    numbers = number_groups(groups, len(problem.work))
    if not 0 <= moves_per_copy <= MOST_MOVES:
        raise ValueError(f"moves_per_copy is {moves_per_copy}, expected a number from 0 to {MOST_MOVES:g}")
    is_shared = np.bincount(numbers) > 1
    if not is_shared.any():
        return None
    samples = samples._replace(price=np.maximum(samples.price >> FEWER_BITS, 1))
    group_of = problem.sort(numbers)
    largest = np.zeros(len(is_shared), dtype=np.int64)
    np.maximum.at(largest, group_of, samples.price)
    copy = np.where(is_shared, np.rint(float(moves_per_copy) * largest), 0).astype(np.int64)
    per_node = start.per_node if start.per_node > 1 else problem.num_parts
    search = GroupSearch(problem, samples, Groups(group_of, copy), int(is_shared.sum()), per_node)
    part_of = search.run(target)
    if problem.time_within_limits(part_of) > target:
        try:
            alone = start.near_home()
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
        settle(samples, self.problem.limits(target, self.per_node), part_of)
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
        level(shares, limits, moved, NO_CAP)
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
        level_tokens(problem, free, part_of, [target], problem.num_parts)
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


def number_groups(groups: ArrayLike, num_samples: int) -> np.ndarray:
    """Numbers the groups from 0 in the order of their first samples, int64 `[samples]`. A sample with a
    negative label gets a number of its own: [70, −1, 30, 70] becomes [0, 1, 2, 0]."""
    labels = np.asarray(groups)
    if labels.shape != (num_samples,) or (labels.dtype.kind not in "iu" and num_samples):
        raise ValueError(
            f"groups has shape {labels.shape} and dtype {labels.dtype}, expected one integer for each of "
            f"{num_samples} samples"
        )
    samples = np.arange(num_samples)
    _, first_of_label, label_of = np.unique(labels, return_index=True, return_inverse=True)
    first = np.where(labels < 0, samples, first_of_label[label_of])
    return (np.cumsum(first == samples) - 1)[first]  # numbers by label would let random ids break ties


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
