"""The search for parts that keep groups of samples together: first with runs of a group, then with samples.

1. Divide groups into units: what is worth bringing together. Place them, the heaviest first.
2. Run the search from home with units in place of samples; then with runs of half as many samples, and so on,
   until the target is reached. Every run that leaves the others of its group pays for a copy.
3. Run it with samples. Last, trade all that a part has of a group, as long as that saves costs.

Other starts do better where few units make up a part, or where groups are together already: units that are
cut to fit, and home. The cheapest result is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike

from .compiled import compiled
from .costs import Costs, make_copies
from .from_scratch import place_units
from .parts import NONE, Task, bucket, even_out, sum_per_part
from .problem import Problem
from .refine import refine_within
from .search import ALL_SWAPS, CHEAP_SWAPS, search_to
from .trades import trade
from .workloads import check_moves_per_copy, number_groups

# Where groups have at most this many copies each, on average, no other start is tried. With twice as many,
# users of four samples would end with 1.04 ranks each; with less than half, far more samples would move.
FEW_COPIES = 0.025
# Units are placed whole up to this many times the target; more is cut. All are tried up to FEW_SAMPLES. With
# more, the next is tried only if the one before misses the target; parts that may differ in rows need no more
# room than the target.
OVERFULL, FEW_SAMPLES = (1.25, 1.0, 1.5, 1.1, 2.0), 1024
OVERFULL_OF_EQUAL_ROWS, OVERFULL_OF_FREE_ROWS = (1.25, 1.0), (1.0, 1.25)


@dataclass(frozen=True)
class GroupSearch:
    """A search that keeps samples of a problem together; samples are in its order."""

    problem: Problem
    costs: Costs
    by_home: np.ndarray  # int64 [samples], sorted by home

    @staticmethod
    def of(problem: Problem, costs: Costs, groups: ArrayLike, moves_per_copy: float) -> GroupSearch | None:
        """Checks the groups, and what a copy is worth; None if no two samples belong together."""
        numbers = number_groups(groups, len(problem.work))
        is_shared = np.bincount(numbers) > 1
        if not is_shared.any():
            return None
        group_of = problem.sort(np.where(is_shared, np.cumsum(is_shared) - 1, NONE)[numbers])
        largest = np.zeros(int(is_shared.sum()), dtype=np.int64)
        in_groups = group_of != NONE
        np.maximum.at(largest, group_of[in_groups], costs.to_move[in_groups])
        copy_cost = np.rint(check_moves_per_copy(moves_per_copy) * largest).astype(np.int64)
        by_home, _ = bucket(costs.home, problem.num_parts)
        return GroupSearch(problem, costs._replace(copies=make_copies(group_of, copy_cost)), by_home)

    def run(self, target: int) -> np.ndarray:
        """int64 `[samples]`: the cheapest result of all starts that reach the target, or come nearest."""

        def rate(part_of: np.ndarray) -> tuple[bool, int, int]:
            is_beyond = self.problem.fault(part_of) is not None
            return is_beyond, max(self.problem.time(part_of), target), self._cost(part_of)

        home = self.costs.home
        are_together = self._count_copies(home).mean() < 1
        found = [home.copy()] if self.reaches(home, target) else []
        from_home = [self.finish(home.copy(), target)] if are_together else []
        for part_of in chain(from_home, self._from_units(target)):
            found.append(part_of)
            if self.reaches(part_of, target) and self._count_copies(part_of).mean() <= FEW_COPIES:
                return part_of
        best = min(found, key=rate)
        if are_together or self.reaches(best, target):
            return best
        return min(best, self.finish(home.copy(), target), key=rate)

    def reaches(self, part_of: np.ndarray, target: int) -> bool:
        """Whether all parts keep to the limits, and none takes longer than the target."""
        return self.problem.fault(part_of) is None and self.problem.time(part_of) <= target

    def finish(self, part_of: np.ndarray, target: int) -> np.ndarray:
        """Returns the result of the search with samples from `part_of`, which changes, and of trades."""
        problem, task = self.problem, self.problem.within(target)
        even_out(task, part_of)
        if not search_to(task, part_of, self.costs, ALL_SWAPS):
            refine_within(problem, part_of, target)
        trade(problem.within(max(target, problem.time(part_of))), part_of, self.costs)
        return part_of

    def _count_copies(self, part_of: np.ndarray) -> np.ndarray:
        """int64 `[groups]`, parts with samples of each, beyond the first; `part_of` is int64 `[samples]`."""
        group_of, num_parts = self.costs.copies.group_of, self.problem.num_parts
        in_groups = group_of != NONE
        has_some = np.zeros(len(self.costs.copies.cost) * num_parts, dtype=np.bool_)
        has_some[group_of[in_groups] * num_parts + part_of[in_groups]] = True
        return has_some.reshape(-1, num_parts).sum(1) - 1

    def _cost(self, part_of: np.ndarray) -> int:
        """The cost of copies and moves of samples that are in these parts, int64 `[samples]`."""
        copies = self._count_copies(part_of).tolist()
        cost = sum(map(int.__mul__, copies, self.costs.copies.cost.tolist()))  # which may exceed int64
        return cost + int(self.costs.to_move[part_of != self.costs.home].sum())

    def _from_units(self, target: int) -> Iterator[np.ndarray]:
        """Yields the results from units that are cut in several ways."""
        starts: list[np.ndarray] = []
        unit_of = _divide_into_units(self.costs, _sort_by_number(self.costs.copies.group_of, self.by_home))
        are_many = len(unit_of) > FEW_SAMPLES
        overfull_of_many = OVERFULL_OF_EQUAL_ROWS if self.problem.fewest > 0 else OVERFULL_OF_FREE_ROWS
        for overfull in overfull_of_many if are_many else OVERFULL:
            start = self._place(unit_of, target, int(overfull * target))
            if any(np.array_equal(start, other) for other in starts):
                continue
            starts.append(start)
            part_of = self._search_with_runs(start.copy(), target)
            yield part_of
            if are_many and self.reaches(part_of, target):
                return

    def _place(self, unit_of: np.ndarray, target: int, cut_at: int) -> np.ndarray:
        """Calls `place_units`; returns int64 `[samples]`, the part of each."""
        problem = self.problem
        by_unit, ends = bucket(unit_of[self.by_home], int(unit_of.max()) + 1)
        order = np.argsort(-np.bincount(unit_of, problem.work), kind="stable")
        lightest = np.zeros(problem.most + 1, dtype=np.int64)
        if problem.fewest > 0 and cut_at <= target:
            sums = np.cumsum(problem.work[::-1])
            taken = np.minimum(np.arange(1, problem.most + 1) * problem.num_parts, len(sums)) - 1
            lightest[1:] = sums[taken] // problem.num_parts
        samples = self.by_home[by_unit]
        return place_units(problem.within(target), self.costs, samples, ends, order, lightest, cut_at)

    def _search_with_runs(self, part_of: np.ndarray, target: int) -> np.ndarray:
        """Returns the result of searches with ever shorter runs from `part_of`, which changes."""
        self._search(part_of, len(part_of), target, ALL_SWAPS)
        rows = min(self.problem.most, -(-len(part_of) // self.problem.num_parts))
        for power in range(int(rows).bit_length() - 1, 0, -1):
            if self.problem.time(part_of) <= target:
                break
            self._search(part_of, 2**power, target, CHEAP_SWAPS)
        return self.finish(part_of, target)

    def _search(self, part_of: np.ndarray, longest: int, target: int, swaps: int) -> None:
        """Changes `part_of` by the search from home, with runs of up to `longest` samples in their place."""
        problem, costs, group_of = self.problem, self.costs, self.costs.copies.group_of
        # 1. Divide what a part has of a group into runs, and number them from the heaviest down.
        alone = group_of == NONE
        number = group_of.copy()
        number[alone] = len(costs.copies.cost) + np.arange(np.count_nonzero(alone))
        order = _sort_by_number(number, _sort_by_number(part_of, self.by_home))
        run_of = _divide_into_runs(number, part_of, order, longest)
        work = sum_per_part(problem.work, run_of, int(run_of.max()) + 1)
        heaviest_first = np.argsort(-work, kind="stable")
        place = np.empty_like(heaviest_first)
        place[heaviest_first] = np.arange(len(work))
        run_of = place[run_of]
        # 2. Describe the runs as if they were samples. Their rows are capped as tokens are.
        part_of_run, group_of_run = np.empty_like(place), np.empty_like(place)
        part_of_run[run_of], group_of_run[run_of] = part_of, group_of
        home, to_move = _find_homes(costs, run_of, part_of_run, problem.num_parts)
        copies = make_copies(group_of_run, costs.copies.cost)
        run_costs = costs._replace(home=home, to_move=to_move, copies=copies)
        rows, initial = np.bincount(run_of), problem.within(target).initial
        most = max(int(problem.most), int(np.bincount(part_of_run, rows).max()))
        # 3. Search, and take the samples along.
        task = Task(work[heaviest_first], rows, initial, target, 0, len(work), most)
        search_to(task, part_of_run, run_costs, swaps)
        part_of[:] = part_of_run[run_of]


def _divide_into_units(costs: Costs, in_groups: np.ndarray) -> np.ndarray:
    """int64 `[samples]`, the unit of each: a group, without those of one home that cost more than a copy.

    Example: a copy costs 64. A group with 100 samples on one part, 70 on another, and 3 on a third, which
    cost 1 each, makes units of 103 and 70: the 3 join the 100.

    `in_groups` are the samples with others, sorted by group and home.
    """
    group_of = costs.copies.group_of
    # 1. Divide groups by home.
    share, begins = _number_runs(group_of[in_groups], costs.home[in_groups])
    group = group_of[in_groups[begins]]
    cost = np.bincount(share, costs.to_move[in_groups]).astype(np.int64)
    # 2. Each is a unit, or joins the one of its group that costs most to move.
    by_cost = np.lexsort((-cost, group))
    costliest = by_cost[np.searchsorted(group, group)]
    joins = np.where(cost > costs.copies.cost[group], np.arange(len(cost)), costliest)
    numbers = np.unique(joins, return_inverse=True)[1]
    # 3. Samples without others are units.
    unit_of, alone = np.empty(len(group_of), dtype=np.int64), np.flatnonzero(group_of == NONE)
    unit_of[in_groups] = numbers[share]
    unit_of[alone] = numbers.max() + 1 + np.arange(len(alone))
    return unit_of


def _divide_into_runs(
    group_of: np.ndarray, part_of: np.ndarray, order: np.ndarray, longest: int
) -> np.ndarray:
    """int64 `[samples]`, the run of each: up to `longest` samples of one group in one part, evenly divided.

    Example: 5 samples of a group in a part, at most 2 long, make runs [0, 0, 1, 1, 2].
    """
    share, begins = _number_runs(group_of[order], part_of[order])
    size = np.bincount(share)
    runs = -(-size // longest)
    run_of, place = np.empty_like(order), np.arange(len(order)) - begins[share]
    run_of[order] = (np.cumsum(runs) - runs)[share] + place * runs[share] // size[share]
    return run_of


def _sort_by_number(numbers: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Sorts those samples whose number, int64 `[samples]`, is not NONE, stably."""
    order, ends = bucket(numbers[samples] + 1, int(numbers.max()) + 2)
    return samples[order][ends[0] :]


def _number_runs(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers the runs of equal pairs, for each pair; and where each run begins."""
    changes = np.append(True, (one[1:] != one[:-1]) | (other[1:] != other[:-1]))
    return np.cumsum(changes) - 1, np.flatnonzero(changes)


@compiled
def _find_homes(
    costs: Costs, run_of: np.ndarray, part_of_run: np.ndarray, num_parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each run the part where most of it is at home, its own in a tie, and the cost of leaving it."""
    home, num_runs = costs.home, len(part_of_run)
    by_run, ends = bucket(run_of, num_runs)
    at_home = np.zeros(num_parts, dtype=np.int64)
    homes, to_move = np.empty(num_runs, dtype=np.int64), np.empty(num_runs, dtype=np.int64)
    first = 0
    for run in range(num_runs):
        best = part_of_run[run]
        for sample in by_run[first : ends[run]]:
            at_home[home[sample]] += costs.to_move[sample]
        for sample in by_run[first : ends[run]]:
            if at_home[home[sample]] > at_home[best]:
                best = home[sample]
        homes[run], to_move[run] = best, max(at_home[best], 1)
        for sample in by_run[first : ends[run]]:
            at_home[home[sample]] = 0
        first = ends[run]
    return homes, to_move
