"""Placements near home: within the limits first, then within the target."""

from __future__ import annotations

import numpy as np

from .compiled import compiled
from .costs import Costs, price_moves
from .from_home import ALL_SWAPS, CHEAP_SWAPS, NO_SWAPS, search_to
from .from_scratch import place_longest_first
from .parts import NO_CAP, NONE, Task, make_parts, sum_per_part, swap
from .problem import Problem
from .search import difference, place_from_scratch, refine_from_scratch

# Where a part has this many times the samples that it may have, or has to give so many away, making one move
# at a time would take too long.
FAR, MANY = 4, 256


def move(problem: Problem, costs: Costs, target: int, tolerance: float) -> np.ndarray:
    """int64 `[samples]`: a partition near home that keeps to the limits, and to the target if that can be."""
    part_of = _keep_to_limits(problem, costs, target)
    move_to(problem, part_of, costs, target, tolerance)
    return part_of


def move_to(problem: Problem, part_of: np.ndarray, costs: Costs, target: int, tolerance: float) -> None:
    """Changes `part_of` until no part takes longer than the target; then sends home what may go.

    Where that fails, the target becomes (1 + tolerance) × the longest time of a search from scratch, and a
    tenth of the tolerance more, because the last step to it would take more moves than all before; but no
    more than the longest time of differencing. Where that fails, too, the partition from scratch is taken, or
    the one given if that is better: speeds or `max_tokens` can make it so.
    """
    given = part_of.copy()
    if search_to(problem.within(target), part_of, costs, CHEAP_SWAPS):
        return
    scratch = refine_from_scratch(problem, 0.0)
    at_first = problem.time(given)
    attained = longest = min(at_first, problem.time(part_of))
    if scratch[-1] != NONE:
        attained = problem.time(scratch)
    relaxed = min(int(min(attained * (1 + 1.1 * tolerance), 2.0**61)), longest)
    differenced = problem.time_within_limits(difference(problem, problem.num_parts))
    relaxed = max(target, min(relaxed, differenced))
    for time in (target, relaxed) if attained <= target else (relaxed,):
        if search_to(problem.within(time), part_of, costs, ALL_SWAPS):
            return
    reached = problem.time(part_of)
    if scratch[-1] != NONE and attained <= min(at_first, reached):
        part_of[:] = _renumber(scratch, costs, problem.speeds)
    elif at_first < reached:
        part_of[:] = given
    search_to(problem.within(relaxed), part_of, costs, NO_SWAPS)


def _keep_to_limits(problem: Problem, costs: Costs, target: int) -> np.ndarray:
    """int64 `[samples]`: home, or a partition near it that keeps to the limits."""
    part_of = costs.home.copy()
    is_capped = problem.max_tokens < NO_CAP
    if not is_capped and np.bincount(part_of).max(initial=0) > FAR * problem.most:
        return _renumber(place_from_scratch(problem, tolerance=0.0), costs, problem.speeds)
    any_rows = problem.fewest == 0 and problem.most == len(part_of)
    task = problem.within(target)
    if any_rows and not is_capped:
        _relieve(task, part_of)
    if problem.fault(part_of) is None:
        return part_of
    even_out(task, part_of)
    if problem.fault(part_of) is None:
        return part_of
    # Keeping all parts within a number of tokens is rebalancing by tokens.
    tokens = problem.by_tokens()
    part_by_tokens = tokens.sort(part_of)
    if any_rows:
        _relieve(tokens.within(problem.max_tokens), part_by_tokens)
    by_tokens = price_moves(tokens.sort(costs.home), tokens.sort(costs.to_move), costs.node_of)
    move_to(tokens, part_by_tokens, by_tokens, problem.max_tokens, 0.0)
    part_of = tokens.unsort(part_by_tokens)
    if problem.fault(part_of) is None:
        return part_of
    return _renumber(place_from_scratch(problem, tolerance=0.0), costs, problem.speeds)


def _relieve(task: Task, part_of: np.ndarray) -> None:
    """Changes `part_of`: parts that have to give many samples away keep their lightest, up to the target.

    The others are placed longest first, which leaves no part with more than the largest had.
    """
    work, num_parts = task.work, len(task.initial)
    load = task.initial + sum_per_part(work, part_of, num_parts)
    size = np.bincount(part_of, minlength=num_parts)
    leaves = np.zeros(len(work), dtype=np.bool_)
    # Samples that leave are no lighter than a part's mean, so that MANY need this much above the target.
    excess = (load - task.target) * size.astype(np.float64)
    for part in np.flatnonzero(excess > MANY * (load - task.initial).astype(np.float64)):
        members = np.flatnonzero(part_of == part)
        lighter = load[part] - np.cumsum(work[members])
        heaviest = members[lighter + work[members] > task.target]
        leaves[heaviest] = len(heaviest) > MANY
    leaving = np.flatnonzero(leaves)
    if leaving.size:
        load -= sum_per_part(work[leaving], part_of[leaving], num_parts)
        no_tokens = np.zeros_like(leaving)
        part_of[leaving] = place_longest_first(
            Task(work[leaving], no_tokens, load, task.target, 0, len(leaving), NO_CAP)
        )


@compiled
def even_out(task: Task, part_of: np.ndarray) -> None:
    """Changes `part_of` until all sizes are within the limits, one move from the largest part at a time."""
    parts = make_parts(task, part_of)
    while True:
        giver = taker = NONE + 1  # numba compiles `swap` anew for literals
        for part in range(len(parts.size)):
            if parts.size[part] > parts.size[giver]:
                giver = part
            if parts.size[part] < parts.size[taker]:
                taker = part
        if parts.size[taker] >= task.fewest and parts.size[giver] <= task.most:
            return
        if parts.size[taker] >= task.fewest:
            for taker in parts.by_load:
                if parts.size[taker] < task.most:
                    break
        wanted = (parts.load[giver] - parts.load[taker]) // 2
        at, last = parts.start[giver], parts.start[giver] + parts.size[giver] - 1
        while at < last and task.work[parts.members[at]] > wanted:
            at += 1
        swap(parts, giver, parts.members[at], taker, NONE)


def _renumber(part_of: np.ndarray, costs: Costs, speeds: np.ndarray) -> np.ndarray:
    """The same partition, its parts renumbered so that much stays at home: the largest matches first.

    Parts keep their speeds.
    """
    num_parts = len(speeds)
    at_home = sum_per_part(costs.to_move, part_of * num_parts + costs.home, num_parts * num_parts)
    matches = np.flatnonzero(at_home)
    number, is_taken = _match(matches[np.argsort(-at_home[matches], kind="stable")], speeds)
    left, free = np.flatnonzero(number == NONE), np.flatnonzero(~is_taken)
    left = left[np.argsort(speeds[left], kind="stable")]
    number[left] = free[np.argsort(speeds[free], kind="stable")]
    return number[part_of]


@compiled
def _match(matches: np.ndarray, speeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number that each part gets, NONE for the others; and which numbers are taken.

    A match is part × number of parts + number, the best one first.
    """
    num_parts = len(speeds)
    number, is_taken = np.empty(num_parts, dtype=np.int64), np.zeros(num_parts, dtype=np.bool_)
    for part in range(num_parts):
        number[part] = NONE
    for match in matches:
        part, home = match // num_parts, match % num_parts
        if number[part] == NONE and not is_taken[home] and speeds[part] == speeds[home]:
            number[part] = home
            is_taken[home] = True
    return number, is_taken
