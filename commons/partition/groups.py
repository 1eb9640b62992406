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

from .compiled import compiled, inner
from .copies import copies_of
from .from_scratch import refine_within
from .problem import Problem
from .search import NONE, Limits, base_of, grouped, sum_per_part, time_of
from .search_from_home import (
    ACROSS_NODES,
    ALL_SWAPS,
    CHEAP_SWAPS,
    Costs,
    even_out,
    search_to,
)
from .token_search import level_tokens
from .trades import trade

# Embeddings of 128 float32 travel once as values and once as gradients: 1,024 bytes for an id, where moving a
# sample sends 16, its item and action.
MOVES_PER_COPY = 64.0
# More could overflow.
MOST_MOVES_PER_COPY = float(ACROSS_NODES)
# Where groups have at most this many copies each, on average, no other start is tried. With twice as many,
# users of four samples would end with 1.04 ranks each; with less than half, far more samples would move.
FEW_COPIES = 0.025
# Units are placed whole up to this many times the target; more is cut. All are tried up to FEW_SAMPLES. With
# more, the next is tried only if the one before misses the target; parts that may differ in rows need no more
# room than the target.
OVERFULL, FEW_SAMPLES = (1.25, 1.0, 1.5, 1.1, 2.0), 1024
OVERFULL_OF_EQUAL_ROWS, OVERFULL_OF_FREE_ROWS = (1.25, 1.0), (1.0, 1.25)


def numbered_groups(groups: ArrayLike, num_samples: int) -> np.ndarray:
    """Numbers the groups from 0 in the order of their first samples, int64 `[samples]`.

    A sample with a negative label gets a number of its own. Were groups numbered by label, labels such as
    random ids would break ties.

    Raises:
        ValueError: `groups` is not one integer per sample.
    """
    labels = np.asarray(groups)
    if labels.shape != (num_samples,) or (labels.dtype.kind not in "iu" and num_samples):
        raise ValueError(
            f"groups has shape {labels.shape} and dtype {labels.dtype}, expected one integer for each of "
            f"{num_samples} samples"
        )
    by_label = np.argsort(labels, kind="stable")
    sorted_labels = labels[by_label]
    is_first = np.append(True, (sorted_labels[1:] != sorted_labels[:-1]) | (sorted_labels[1:] < 0))
    is_first = is_first[:num_samples]
    first = np.empty(num_samples, dtype=np.int64)
    first[by_label] = by_label[is_first][np.cumsum(is_first) - 1]
    return (np.cumsum(first == np.arange(num_samples)) - 1)[first]


def checked_moves_per_copy(moves_per_copy: float) -> float:
    """Returns `moves_per_copy`; raises ValueError unless it is a number from 0 to MOST_MOVES_PER_COPY."""
    if not 0 <= moves_per_copy <= MOST_MOVES_PER_COPY:
        raise ValueError(
            f"moves_per_copy is {moves_per_copy}, expected a number from 0 to {MOST_MOVES_PER_COPY:g}"
        )
    return float(moves_per_copy)


@dataclass(frozen=True)
class Grouped:
    """Samples of a problem that belong together, in its order.

    Attributes:
        problem: of all samples.
        costs: of moves, without groups.
        group_of: int64 `[samples]`, NONE for a sample without others.
        of_copy: int64 `[groups]`.
        by_home: int64 `[samples]`, sorted by home.
    """

    problem: Problem
    costs: Costs
    group_of: np.ndarray
    of_copy: np.ndarray
    by_home: np.ndarray

    @staticmethod
    def of(problem: Problem, costs: Costs, groups: ArrayLike, moves_per_copy: float) -> Grouped | None:
        """Checks the groups, and what a copy is worth; None if no two samples belong together."""
        numbers = numbered_groups(groups, len(problem.work))
        sizes = np.bincount(numbers)
        is_shared = sizes > 1
        if not is_shared.any():
            return None
        numbers = np.where(is_shared, np.cumsum(is_shared) - 1, NONE)[numbers]
        group_of = problem.sorted(numbers)
        largest = np.zeros(int(is_shared.sum()), dtype=np.int64)
        together = group_of != NONE
        np.maximum.at(largest, group_of[together], costs.of_move[together])
        of_copy = np.rint(checked_moves_per_copy(moves_per_copy) * largest).astype(np.int64)
        by_home, _ = grouped(costs.home, problem.num_parts)
        return Grouped(problem, costs, group_of, of_copy, by_home)

    def copies(self, part_of: np.ndarray) -> np.ndarray:
        """int64 `[groups]`, parts with samples of each, beyond the first; `part_of` is int64 `[samples]`."""
        num_parts, together = self.problem.num_parts, self.group_of != NONE
        has_some = np.zeros(len(self.of_copy) * num_parts, dtype=np.bool_)
        has_some[self.group_of[together] * num_parts + part_of[together]] = True
        return has_some.reshape(-1, num_parts).sum(1) - 1

    def has_few_copies(self, part_of: np.ndarray) -> bool:
        """Returns whether groups have at most FEW_COPIES copies each, on average."""
        return bool(self.copies(part_of).mean() <= FEW_COPIES)

    def cost(self, part_of: np.ndarray) -> int:
        """The cost of copies and moves of samples that are in these parts, int64 `[samples]`."""
        copies = self.copies(part_of).tolist()
        of_copies = sum(map(int.__mul__, copies, self.of_copy.tolist()))  # which may exceed int64
        return of_copies + int(self.costs.of_move[part_of != self.costs.home].sum())

    def time(self, part_of: np.ndarray) -> int:
        """The time of the slowest part."""
        return int(time_of(self.problem.work, part_of, self.problem.speeds))

    def reaches(self, part_of: np.ndarray, target: int) -> bool:
        """Returns whether all parts keep to the limits, and none takes longer than the target."""
        return self.problem.beyond_limits(part_of) is None and self.time(part_of) <= target

    def units(self) -> np.ndarray:
        """int64 `[samples]`, the unit of each: a group, without samples that had better stay at home."""
        by_group, ends = grouped(self.group_of[self.by_home] + 1, len(self.of_copy) + 1)
        in_groups = self.by_home[by_group][ends[0] :]
        return _units(self.group_of, self.of_copy, in_groups, self.costs.home, self.costs.of_move)

    def placed(self, unit_of: np.ndarray, target: int, cut_at: int) -> np.ndarray:
        """int64 `[samples]`, the part of each: units at home where there is room, else in the lightest part.

        Units are cut that have no place within `limits.most` samples and a load of `cut_at`.
        """
        work, limits, num_parts = self.problem.work, self.problem.limits, self.problem.num_parts
        by_unit, ends = grouped(unit_of[self.by_home], int(unit_of.max()) + 1)
        of_units = np.bincount(unit_of, work)
        lightest = np.zeros(limits.most + 1, dtype=np.int64)
        if limits.fewest > 0 and cut_at <= target:
            sums = np.cumsum(work[::-1])
            taken = np.minimum(np.arange(1, limits.most + 1) * num_parts, len(work)) - 1
            lightest[1:] = sums[taken] // num_parts
        return _placed(
            work,
            self.by_home[by_unit],
            ends,
            np.argsort(-of_units, kind="stable"),
            self.costs.home,
            self.costs.of_move,
            base_of(self.problem.speeds, target),
            limits.most,
            lightest,
            target,
            cut_at,
        )

    def runs(self, part_of: np.ndarray, longest: int) -> np.ndarray:
        """int64 `[samples]`, the run of each: up to `longest` samples of one group in one part."""
        group_of, num_groups = self.group_of, len(self.of_copy)
        alone = group_of == NONE
        number = group_of.copy()
        number[alone] = num_groups + np.arange(np.count_nonzero(alone))
        order = self.by_home[grouped(part_of[self.by_home], self.problem.num_parts)[0]]
        order = order[grouped(number[order], num_groups + np.count_nonzero(alone))[0]]
        return _runs(number, part_of, order, longest)

    def search(self, part_of: np.ndarray, run_of: np.ndarray, target: int, swaps: int) -> None:
        """Changes `part_of` by the search from home, with runs in place of samples."""
        problem, num_runs = self.problem, int(run_of.max()) + 1
        work = sum_per_part(problem.work, run_of, num_runs)
        order = np.argsort(-work, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(num_runs)
        run_of = place[run_of]
        parts_of_runs, group_of = np.empty_like(order), np.empty_like(order)
        parts_of_runs[run_of], group_of[run_of] = part_of, self.group_of
        home, of_move = _homes(run_of, self.costs.home, self.costs.of_move, parts_of_runs, problem.num_parts)
        copies = copies_of(group_of, self.of_copy, parts_of_runs)
        costs = Costs(home, of_move, self.costs.node_of, copies, self.costs.looks)
        # Rows of a part are capped as tokens are.
        rows = np.bincount(run_of)
        most = max(int(problem.limits.most), int(np.bincount(parts_of_runs, rows).max()))
        base, limits = base_of(problem.speeds, target), Limits(0, num_runs, most)
        search_to(work[order], rows, parts_of_runs, base, limits, costs, target, swaps)
        part_of[:] = parts_of_runs[run_of]

    def lengths(self) -> list[int]:
        """Lengths of runs to search with, each half of the one before."""
        rows = min(self.problem.limits.most, -(-len(self.group_of) // self.problem.num_parts))
        return [2**power for power in range(int(rows).bit_length() - 1, 0, -1)]

    def finish(self, part_of: np.ndarray, target: int) -> np.ndarray:
        """Returns the result of the search with samples from `part_of`, which changes, and of trades."""
        problem, costs = self.problem, self.costs
        work, tokens, limits = problem.work, problem.tokens, problem.limits
        base = base_of(problem.speeds, target)
        even_out(work, part_of, base, limits)
        priced = costs._replace(copies=copies_of(self.group_of, self.of_copy, part_of))
        if not search_to(work, tokens, part_of, base, limits, priced, target, ALL_SWAPS):
            refine_within(work, tokens, part_of, problem.speeds, limits, target)
            priced = costs._replace(copies=copies_of(self.group_of, self.of_copy, part_of))
        attained = max(target, self.time(part_of))
        trade(work, tokens, part_of, base_of(problem.speeds, attained), limits, priced, attained)
        return part_of

    def level_tokens(self, part_of: np.ndarray, target: int) -> None:
        """`token_search.level_tokens`, with a price on copies."""
        copies = copies_of(self.group_of, self.of_copy, part_of)
        level_tokens(self.problem, self.costs._replace(copies=copies), part_of, target)


def together(samples: Grouped, target: int) -> np.ndarray:
    """int64 `[samples]`: the cheapest of the results of all starts that reach the target, or come nearest."""

    def from_home() -> np.ndarray:
        return samples.finish(samples.costs.home.copy(), target)

    def from_units(part_of: np.ndarray) -> np.ndarray:
        samples.search(part_of, samples.runs(part_of, len(part_of)), target, ALL_SWAPS)
        for length in samples.lengths():
            if samples.time(part_of) <= target:
                break
            samples.search(part_of, samples.runs(part_of, length), target, CHEAP_SWAPS)
        return samples.finish(part_of, target)

    def from_all_units() -> Iterator[np.ndarray]:
        starts: list[np.ndarray] = []
        units = samples.units()
        are_many = len(units) > FEW_SAMPLES
        has_equal_rows = samples.problem.limits.fewest > 0
        of_many = OVERFULL_OF_EQUAL_ROWS if has_equal_rows else OVERFULL_OF_FREE_ROWS
        for overfull in of_many if are_many else OVERFULL:
            start = samples.placed(units, target, int(overfull * target))
            if any(np.array_equal(start, other) for other in starts):
                continue
            starts.append(start)
            part_of = from_units(start.copy())
            yield part_of
            if are_many and samples.reaches(part_of, target):
                return

    def rated(part_of: np.ndarray) -> tuple[bool, int, int]:
        is_beyond = samples.problem.beyond_limits(part_of) is not None
        return is_beyond, max(samples.time(part_of), target), samples.cost(part_of)

    home = samples.costs.home
    are_together = samples.copies(home).mean() < 1
    found = [home.copy()] if samples.reaches(home, target) else []
    for part_of in chain([from_home()] if are_together else [], from_all_units()):
        found.append(part_of)
        if samples.reaches(part_of, target) and samples.has_few_copies(part_of):
            return part_of
    best = min(found, key=rated)
    if are_together or samples.reaches(best, target):
        return best
    return min(best, from_home(), key=rated)


@compiled
def _units(
    group_of: np.ndarray, of_copy: np.ndarray, in_groups: np.ndarray, home: np.ndarray, of_move: np.ndarray
) -> np.ndarray:
    """`Grouped.units`; `in_groups` are the samples with others, sorted by group and home.

    Samples of a group with one home stay there as a unit of their own, if their moves cost more than a copy.
    """
    unit_of, units, first = np.full(len(group_of), NONE, dtype=np.int64), 0, 0
    while first < len(in_groups):
        group, end = group_of[in_groups[first]], first
        most, run_with_most = -1, first
        while end < len(in_groups) and group_of[in_groups[end]] == group:
            run, cost = end, 0
            while end < len(in_groups) and _is_same(group_of, home, in_groups[run], in_groups[end]):
                cost += of_move[in_groups[end]]
                end += 1
            unit = NONE
            if cost > of_copy[group]:
                units += 1
                unit = units
            if cost > most:
                most, run_with_most = cost, run
            for at in range(run, end):
                unit_of[in_groups[at]] = unit
        # The others join the one that costs most to move.
        joined = unit_of[in_groups[run_with_most]]
        if joined == NONE:
            units += 1
            joined = units
        for at in range(first, end):
            if unit_of[in_groups[at]] == NONE:
                unit_of[in_groups[at]] = joined
        first = end
    for sample in range(len(group_of)):
        if unit_of[sample] == NONE:
            units += 1
            unit_of[sample] = units
    return unit_of - 1


@inner
def _is_same(group_of: np.ndarray, part_of: np.ndarray, one: int, other: int) -> bool:
    return group_of[one] == group_of[other] and part_of[one] == part_of[other]


@compiled
def _runs(group_of: np.ndarray, part_of: np.ndarray, order: np.ndarray, longest: int) -> np.ndarray:
    """`Grouped.runs`; samples are in order of group and part. Runs of a group in a part differ by one."""
    run_of, runs, first = np.empty(len(order), dtype=np.int64), 0, 0
    while first < len(order):
        end = first
        while end < len(order) and _is_same(group_of, part_of, order[first], order[end]):
            end += 1
        count = -(-(end - first) // longest)
        for at in range(first, end):
            run_of[order[at]] = runs + (at - first) * count // (end - first)
        runs += count
        first = end
    return run_of


@compiled
def _homes(
    run_of: np.ndarray, home: np.ndarray, of_move: np.ndarray, part_of: np.ndarray, num_parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each run the part where most of it is at home, its own in a tie, and the cost of leaving it."""
    num_runs = len(part_of)
    by_run, ends = grouped(run_of, num_runs)
    at_home = np.zeros(num_parts, dtype=np.int64)
    homes, costs = np.empty(num_runs, dtype=np.int64), np.empty(num_runs, dtype=np.int64)
    first = 0
    for run in range(num_runs):
        best = part_of[run]
        for sample in by_run[first : ends[run]]:
            at_home[home[sample]] += of_move[sample]
        for sample in by_run[first : ends[run]]:
            if at_home[home[sample]] > at_home[best]:
                best = home[sample]
        homes[run], costs[run] = best, max(at_home[best], 1)
        for sample in by_run[first : ends[run]]:
            at_home[home[sample]] = 0
        first = ends[run]
    return homes, costs


@compiled
def _placed(
    work: np.ndarray,
    samples: np.ndarray,
    ends: np.ndarray,
    order: np.ndarray,
    home: np.ndarray,
    of_move: np.ndarray,
    base: np.ndarray,
    most: int,
    lightest: np.ndarray,
    target: int,
    cut_at: int,
) -> np.ndarray:
    """`Grouped.placed`: units are `samples` up to each of `ends`, placed in this order.

    A part needs `lightest[r]` for the rows that it has room for: the mean load of the lightest r per part.
    """
    num_parts = len(base)
    part_of = np.full(len(work), NONE, dtype=np.int64)
    load, size = base.copy(), np.zeros(num_parts, dtype=np.int64)
    at_home, sums = np.zeros(num_parts, dtype=np.int64), np.zeros(len(work) + 1, dtype=np.int64)
    for unit in order:
        first = ends[unit - 1] if unit > 0 else 0
        while first < ends[unit]:
            rows = ends[unit] - first
            for at in range(rows):
                sample = samples[first + at]
                sums[at + 1] = sums[at] + work[sample]
                at_home[home[sample]] += of_move[sample]
            best, count = NONE, rows
            for sample in samples[first : ends[unit]]:
                part = home[sample]
                left = most - size[part] - rows
                if left < 0 or load[part] + sums[rows] + lightest[left] > target:
                    continue
                if best == NONE or (at_home[part], -load[part]) > (at_home[best], -load[best]):
                    best = part
            for sample in samples[first : ends[unit]]:
                at_home[home[sample]] = 0
            if best == NONE:
                best, count = _most_room(load, size, most, lightest, cut_at, sums[: rows + 1])
            for sample in samples[first : first + count]:
                part_of[sample] = best
            load[best] += sums[count]
            size[best] += count
            first += count
    return part_of


@inner
def _most_room(
    load: np.ndarray, size: np.ndarray, most: int, lightest: np.ndarray, cut_at: int, sums: np.ndarray
) -> tuple[int, int]:
    """The part that takes most of a unit, the lightest of these, and how many samples; at least 1.

    `sums` are those of the unit's first samples.
    """
    best, count = NONE, 0
    for part in range(len(load)):
        left = most - size[part]
        fits, end = 0, min(len(sums) - 1, left)
        while fits < end:
            middle = (fits + end + 1) // 2
            if load[part] + sums[middle] + lightest[left - middle] <= cut_at:
                fits = middle
            else:
                end = middle - 1
        if left == 0 or fits < count:
            continue
        is_lighter = best == NONE or load[part] + lightest[left] < load[best] + lightest[most - size[best]]
        if fits > count or is_lighter:
            best, count = part, fits
    return best, max(count, 1)
