"""The search for balance alone: swaps that lighten the heaviest part, from the best of several starts."""

from __future__ import annotations

import numpy as np

from .compiled import compiled, inner
from .from_scratch import bound_differencing, place_by_differencing, place_longest_first
from .parts import NO_CAP, NONE, RESOLUTION, Parts, Task, fits, make_parts, sum_per_part, swap
from .problem import Problem, are_unequal

# A swap is accepted once it brings the heaviest part near the middle between it and the lightest: within 1/8
# of their distance. Until then, this many partners are tried in either direction after the first swap.
NEAR_ENOUGH = 8
TRIES = 16
# Partners that the search looks at: this many × samples × the logarithm of their number. Then it takes what
# it has. Under tight caps hardly any swap is allowed, and it would look at all of them again and again.
LOOKS = 16
# Where parts have at most this many samples in the mean, the search is cheap but often gets stuck: it tries
# several starts.
FEW_SAMPLES = 8
# With unequal sizes, differencing takes time in proportion to samples × parts. Where there are many of both
# it is left out: it lowers the largest load by at most 0.01%.
SHORT_DIFFERENCING = 2**17
# Differencing is tried if it may end above the target by at most this share. To refine more than that takes
# longer than to start from longest first.
NEAR = 1e-3
# A share of the target above it at which no other start is tried.
GOOD = 1e-4
# Target times that are tried where speeds differ and the first one is out of reach.
MAX_TRIED_TIMES = 8


def place_from_scratch(problem: Problem, tolerance: float | None = None) -> np.ndarray:
    """int64 `[samples]`, the part of each: longest first, refined unless `tolerance` is None.

    Where longest first finds no place for a sample, it starts from samples balanced by their tokens.

    Raises:
        ValueError: neither start keeps to `max_tokens`.
    """
    if tolerance is None:
        part_of = place_longest_first(problem.within(problem.target(0.0)))
    else:
        part_of = refine_from_scratch(problem, tolerance)
    if len(part_of) > 0 and part_of[-1] == NONE:
        part_of = _balance_tokens(problem, unplaced=int(np.argmax(part_of == NONE)))
        if tolerance is not None:
            refine_within(problem, part_of, problem.target(tolerance))
    return part_of


def _balance_tokens(problem: Problem, unplaced: int) -> np.ndarray:
    """int64 `[samples]`; `unplaced` is the sample that longest first had no place for."""
    tokens = problem.by_tokens()
    part_of = tokens.unsort(refine_from_scratch(tokens, 0.0))
    if problem.fault(part_of) is not None:
        raise ValueError(
            f"no placement under max_tokens={problem.max_tokens} was found: sample {problem.order[unplaced]} "
            f"with {problem.tokens[unplaced]} tokens fits in none of {problem.num_parts} parts next to the "
            "others; raise max_tokens, or use more parts"
        )
    return part_of


def refine_from_scratch(problem: Problem, tolerance: float) -> np.ndarray:
    """int64 `[samples]`, the part of each, refined; the last is NONE if some sample has no place.

    Never worse than differencing with equal sizes, where that keeps to the limits.
    """
    work, num_parts = problem.work, problem.num_parts
    best, time = np.full(len(work), NONE), NO_CAP
    if len(work) == 0:
        return best
    target = problem.target(tolerance)
    is_small = len(work) <= FEW_SAMPLES * num_parts
    equal_sizes: np.ndarray | None = None
    least = bound_differencing(work, num_parts)
    # 1. Differencing with equal sizes, if it can be good enough.
    if is_small or least <= target * (1 + NEAR):
        equal_sizes = difference(problem, num_parts)
        least = problem.time_within_limits(equal_sizes)
    if equal_sizes is not None and (is_small or least <= target * (1 + NEAR)):
        best, time = _better(problem, best, time, equal_sizes, target)
    # 2. Differencing with free sizes.
    if is_small and problem.fewest < problem.most - 1 and len(work) * num_parts <= SHORT_DIFFERENCING:
        best, time = _better(problem, best, time, difference(problem, 1), target)
    # 3. Longest first, the usual start.
    if is_small or time > target * (1 + GOOD):
        start = place_longest_first(problem.within(target))
        if time == NO_CAP:
            best = start  # even where it leaves samples without a place
        best, time = _better(problem, best, time, start, target)
    # 4. Differencing with equal sizes, if all that was worse.
    if time > max(least, target):
        if equal_sizes is None:
            equal_sizes = difference(problem, num_parts)
        least = problem.time_within_limits(equal_sizes)
        if time == NO_CAP:
            best, time = _better(problem, best, time, equal_sizes, target)
        elif least < time:
            best = equal_sizes  # refining it would take longer than all before
    return best


def difference(problem: Problem, width: int) -> np.ndarray:
    """`place_by_differencing`, and the heaviest part to the fastest."""
    part_of = place_by_differencing(problem.work, problem.num_parts, width)
    if not are_unequal(problem.speeds):
        return part_of
    return np.argsort(-problem.speeds, kind="stable")[part_of]


def _better(
    problem: Problem, best: np.ndarray, time: int, start: np.ndarray, target: int
) -> tuple[np.ndarray, int]:
    """The better of `best` and `start`, refined, and its longest time; NO_CAP stands for no partition."""
    if time <= target:
        return best, time
    start_time = problem.time_within_limits(start)
    if start_time == NO_CAP:
        return best, time
    if start_time > target:
        start_time = refine_within(problem, start, target)
        if start_time > target and are_unequal(problem.speeds):
            start = _heaviest_on_fastest(problem, start)
            start_time = refine_within(problem, start, target)
    return (start, start_time) if start_time < time else (best, time)


def _heaviest_on_fastest(problem: Problem, part_of: np.ndarray) -> np.ndarray:
    """The same partition, its parts renumbered: the heavier, the faster. No time is longer than before."""
    by_load = np.argsort(-sum_per_part(problem.work, part_of, problem.num_parts), kind="stable")
    number = np.empty_like(by_load)
    number[by_load] = np.argsort(-problem.speeds, kind="stable")
    return number[part_of]


def refine_within(problem: Problem, part_of: np.ndarray, target: int) -> int:
    """Changes `part_of` until no part takes longer than the target, or nothing helps; returns the longest."""
    if not are_unequal(problem.speeds):
        refine_to(problem.within(target), part_of)
        return problem.time(part_of)
    # Swaps lower the largest load beyond what a time allows, and so find the parts for a time that can be
    # had. Of the times between the target and the best so far, the middle one is tried next.
    time = problem.time(part_of)
    tried, failed = target, target
    for _ in range(MAX_TRIED_TIMES):
        if time <= target or time - failed <= RESOLUTION * time:
            break
        found = part_of.copy()
        refine_to(problem.within(tried), found)
        reached = problem.time(found)
        if reached < time:
            part_of[:] = found
            time = reached
        if reached > tried:
            failed = tried
        tried = failed + (time - failed) // 2
    return time


@compiled
def refine_to(task: Task, part_of: np.ndarray) -> None:
    """Changes `part_of` until no part is above the target load, or no swap helps."""
    parts = make_parts(task, part_of)
    total = 0
    for each in task.work:
        total += each
    least = max(int(RESOLUTION * total / len(parts.load)), 1)
    bits = 1
    while len(part_of) >> bits:
        bits += 1
    most_looks = LOOKS * len(part_of) * bits
    while len(parts.load) > 1:
        heavy = parts.by_load[-1]
        if parts.load[heavy] <= task.target:
            break
        gives, partner, returns, looks = find_swap(parts, heavy, least, most_looks)
        most_looks -= looks
        if partner == NONE or most_looks < 0:
            break
        swap(parts, heavy, gives, partner, returns)


@inner
def find_swap(parts: Parts, heavy: int, least: int, most_looks: int) -> tuple[int, int, int, int]:
    """Finds the swap that most lowers the larger of two loads, by at least `least`.

    Example: a part of load 100 should give the lightest, of load 60, a difference of 20: for its sample of
    50, it looks from samples of 30 on. One of 32 in a part of load 64 makes both loads 82.

    Returns:
        (sample given, partner, sample returned, partners looked at); the partner is NONE if there is no such
        swap among the first `most_looks`.
    """
    task, part_of, loads = parts.task, parts.part_of, parts.load
    work, load, lightest = task.work, loads[heavy], loads[parts.by_load[0]]
    below = load - least + 1  # what the larger load has to be under
    enough = load - (load - lightest) // 2 + (load - lightest) // NEAR_ENOUGH
    gives, partner, returns, looks = NONE, NONE, NONE, 0
    taker = NONE if parts.size[heavy] == task.fewest else _lightest_taker(parts, heavy, NONE)
    for at in range(parts.start[heavy], parts.start[heavy] + parts.size[heavy]):
        # 1. The best sample in return takes half the distance to the lightest part.
        i = parts.members[at]
        middle = _first_at_most(work, i + 1, work[i] - (load - lightest) // 2)
        # 2. From there, try lighter and heavier ones, as long as they can be better than the best so far.
        for step in (1, -1):
            j = middle if step == 1 else middle - 1
            while i < j < len(work) and (partner == NONE or abs(j - middle) <= TRIES):
                difference = work[i] - work[j]
                if (lightest + difference if step == 1 else load - difference) >= below:
                    break
                larger = max(load - difference, loads[part_of[j]] + difference)
                if larger < below and part_of[j] != heavy and fits(parts, heavy, i, part_of[j], j):
                    below, gives, partner, returns = larger, i, part_of[j], j
                j += step
                looks += 1
        # 3. Where sizes allow it, the lightest part may take the sample for none.
        if taker != NONE and max(load - work[i], loads[taker] + work[i]) < below:
            other = _lightest_taker(parts, heavy, i)  # the same, unless it has no room for its tokens
            if other != NONE and max(load - work[i], loads[other] + work[i]) < below:
                below, gives, partner, returns = max(load - work[i], loads[other] + work[i]), i, other, NONE
        if looks > most_looks or (partner != NONE and below <= enough):
            break
    return gives, partner, returns, looks


@inner
def _lightest_taker(parts: Parts, giver: int, sample: int) -> int:
    """The lightest part with room for one more sample, and for this one unless it is NONE; else NONE."""
    for taker in parts.by_load:
        if taker == giver or parts.size[taker] == parts.task.most:
            continue
        if sample == NONE or fits(parts, giver, sample, taker, NONE):
            return taker
    return NONE


@inner
def _first_at_most(work: np.ndarray, start: int, value: int) -> int:
    """The first sample from `start` on whose work is at most `value`; the number of samples if none is."""
    left = len(work) - start
    while left > 1:  # without a branch, which the processor would mispredict every other time
        half = left // 2
        start += half * (work[start + half - 1] > value)
        left -= half
    return start + (left == 1 and work[start] > value)
