"""Units and runs: samples of a group that are placed, or moved, as one."""

from __future__ import annotations

import numpy as np

from .compiled import compiled, inner
from .costs import Costs
from .parts import NONE, Task, bucket


@compiled
def divide_into_units(costs: Costs, in_groups: np.ndarray) -> np.ndarray:
    """int64 `[samples]`, the unit of each: a group, without samples that had better stay at home.

    Samples of a group with one home stay there as a unit of their own, if their moves cost more than a copy.

    Example: a copy costs 64. A group with 100 samples on one part, 70 on another, and 3 on a third, which
    cost 1 each, makes units of 103 and 70: the 3 join the 100.

    Args:
        costs: of moves and copies.
        in_groups: the samples with others, sorted by group and home.
    """
    group_of, home = costs.copies.group_of, costs.home
    unit_of, units, first = np.full(len(group_of), NONE, dtype=np.int64), 0, 0
    while first < len(in_groups):
        # 1. Number the homes of the group whose samples had better stay.
        group, end = group_of[in_groups[first]], first
        most, costliest = -1, first
        while end < len(in_groups) and group_of[in_groups[end]] == group:
            run, cost = end, 0
            while end < len(in_groups) and _are_alike(group_of, home, in_groups[run], in_groups[end]):
                cost += costs.to_move[in_groups[end]]
                end += 1
            unit = NONE
            if cost > costs.copies.cost[group]:
                units += 1
                unit = units
            if cost > most:
                most, costliest = cost, run
            for at in range(run, end):
                unit_of[in_groups[at]] = unit
        # 2. The others join the one that costs most to move.
        joined = unit_of[in_groups[costliest]]
        if joined == NONE:
            units += 1
            joined = units
        for at in range(first, end):
            if unit_of[in_groups[at]] == NONE:
                unit_of[in_groups[at]] = joined
        first = end
    # 3. Samples without others are units.
    for sample in range(len(group_of)):
        if unit_of[sample] == NONE:
            units += 1
            unit_of[sample] = units
    return unit_of - 1


@inner
def _are_alike(group_of: np.ndarray, part_of: np.ndarray, one: int, other: int) -> bool:
    return group_of[one] == group_of[other] and part_of[one] == part_of[other]


@compiled
def divide_into_runs(
    group_of: np.ndarray, part_of: np.ndarray, order: np.ndarray, longest: int
) -> np.ndarray:
    """int64 `[samples]`, the run of each: up to `longest` samples of one group in one part.

    Runs of a group in a part differ by one sample at most. `order` is that of group and part.
    """
    run_of, runs, first = np.empty(len(order), dtype=np.int64), 0, 0
    while first < len(order):
        end = first
        while end < len(order) and _are_alike(group_of, part_of, order[first], order[end]):
            end += 1
        count = -(-(end - first) // longest)
        for at in range(first, end):
            run_of[order[at]] = runs + (at - first) * count // (end - first)
        runs += count
        first = end
    return run_of


@compiled
def find_homes(
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


@compiled
def place_units(
    task: Task,
    costs: Costs,
    samples: np.ndarray,
    ends: np.ndarray,
    order: np.ndarray,
    lightest: np.ndarray,
    cut_at: int,
) -> np.ndarray:
    """int64 `[samples]`, the part of each: units at home where there is room, else in the lightest part.

    Args:
        task, costs: of the samples.
        samples: by unit.
        ends: where each unit ends in `samples`.
        order: of the units, as they are placed.
        lightest: `[most + 1]`, the load that a part needs for the rows that it still takes: the mean load of
            the lightest r per part.
        cut_at: load of a part up to which a unit is placed whole; beyond, it is cut.
    """
    home, most, num_parts = costs.home, task.most, len(task.initial)
    part_of = np.full(len(samples), NONE, dtype=np.int64)
    load, size = task.initial.copy(), np.zeros(num_parts, dtype=np.int64)
    at_home, sums = np.zeros(num_parts, dtype=np.int64), np.zeros(len(samples) + 1, dtype=np.int64)
    for unit in order:
        first = ends[unit - 1] if unit > 0 else 0
        while first < ends[unit]:
            # 1. Add up the unit's work, and what stays at home with each part.
            rows = ends[unit] - first
            for at in range(rows):
                sample = samples[first + at]
                sums[at + 1] = sums[at] + task.work[sample]
                at_home[home[sample]] += costs.to_move[sample]
            # 2. Take the home with room where most of it stays.
            best, count = NONE, rows
            for sample in samples[first : ends[unit]]:
                part = home[sample]
                left = most - size[part] - rows
                if left < 0 or load[part] + sums[rows] + lightest[left] > task.target:
                    continue
                if best == NONE or (at_home[part], -load[part]) > (at_home[best], -load[best]):
                    best = part
            for sample in samples[first : ends[unit]]:
                at_home[home[sample]] = 0
            # 3. Without such a home, take the part with most room, and place the rest again.
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
