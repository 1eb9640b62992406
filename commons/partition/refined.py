"""Partitions from scratch: longest first, and leveled by swaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from .karmarkar_karp import bound_differencing, difference
from .kernels import NO_CAP, NONE, Limits, Samples, place, settle, sum_per_part
from .problem import Problem, are_unequal, in_lists, indices_of_parts, number_of_part
from .token_levels import level_tokens
from .workloads import check_tolerance

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
# Target times that are tried where the first one is out of reach.
MAX_TRIED_TIMES = 5
# The first target is this share above the one that is wanted, and others end where that would be enough.
NEXT_TO, RESOLUTION = 3e-5, 1e-4


@in_lists
def longest_processing_time(
    workloads: ArrayLike,
    num_partitions: int,
    equal_size: bool = True,
    *,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
    speeds: ArrayLike | None = None,
) -> np.ndarray:
    """Places each sample, the heaviest first, in the lightest part that can take it.

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.

    Args:
        workloads: `[samples]`, non-negative.
        num_partitions: parts, at least 1.
        equal_size: part sizes differ by at most one; else sizes follow the load.
        tokens, max_tokens: `[samples]`, whole numbers, and how many of them a part may have. If that leaves a
            sample without a place, the samples are balanced by their tokens instead.
        speeds: `[parts]`, above 0, in any unit: loads are divided by them, so that times become equal.

    Returns:
        For each part the ascending int64 indices of its samples.

    Raises:
        ValueError: a value is negative, NaN, or infinite; `num_partitions` is below 1; `speeds` are not a
            number above 0 per part; no placement can keep to the caps; or none that does was found. The last
            error names a sample that fits nowhere.
    """
    problem = Problem.of(workloads, num_partitions, equal_size, tokens, max_tokens, speeds)
    return problem.unsort(place_from_scratch(problem))


@in_lists
def refined(
    workloads: ArrayLike,
    num_partitions: int,
    equal_size: bool = True,
    *,
    tolerance: float = 0.0,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
    speeds: ArrayLike | None = None,
    token_tolerance: float | None = None,
) -> np.ndarray:
    """Runs `longest_processing_time`, then `refine`: the best balance of all functions here.

    It also starts from equal-size `karmarkar_karp` where that may be better, and is never worse than it.
    Where only that start is tried, longest first may be better by 1e-4 of the bound.

    Arguments, result, and errors are as theirs, and as those of `rebalance` for `token_tolerance`.
    """
    tolerance = check_tolerance(tolerance)
    problem = Problem.of(workloads, num_partitions, equal_size, tokens, max_tokens, speeds, token_tolerance)
    part_of = place_from_scratch(problem, tolerance)
    if problem.token_tolerance is not None:
        level_tokens(problem, without_home(problem), part_of, problem.target(tolerance))
    return problem.unsort(part_of)


def refine(
    workloads: ArrayLike,
    partition: Sequence[ArrayLike],
    tolerance: float = 0.0,
    equal_size: bool = True,
    *,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
    speeds: ArrayLike | None = None,
) -> list[np.ndarray]:
    """Swaps samples between heavy and light parts until the tolerance is met or no swap helps.

    Where part sizes allow it, a swap may move one sample and return none. The result is never worse than
    `partition`, and about within 1e-4 of what the swaps can reach.

    Arguments and result are as of `longest_processing_time`, and the latter is what `partition` is. The
    largest load ÷ speed may be (1 + tolerance) × the lower bound.

    Raises:
        ValueError: as `longest_processing_time`; or `tolerance` is negative; or `partition` does not hold
            each sample once, or does not keep to the limits.
    """
    tolerance = check_tolerance(tolerance)
    problem = Problem.of(workloads, len(partition), equal_size, tokens, max_tokens, speeds)
    part_of = problem.sort(number_of_part(partition, len(problem.work)))
    fault = problem.fault(part_of)
    if fault is not None:
        raise ValueError(fault)
    refine_within(problem, part_of, problem.target(tolerance))
    return indices_of_parts(problem.unsort(part_of), problem.num_parts)


def place_from_scratch(problem: Problem, tolerance: float | None = None) -> np.ndarray:
    """int64 `[samples]`, the part of each: longest first, or by tokens; refined unless `tolerance` is None.

    Raises:
        ValueError: neither start keeps to `max_tokens`.
    """
    if tolerance is None:
        part_of = place_longest_first(problem, problem.target(0.0))
    else:
        part_of = refine_from_scratch(problem, tolerance)
    if (part_of == NONE).any():
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
    """int64 `[samples]`, the part of each, refined; NONE for samples without a place.

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
        best, time = _pick_better(problem, best, time, equal_sizes, target)
    # 2. Differencing with free sizes.
    if is_small and problem.fewest == 0 and problem.most > 1 and len(work) * num_parts <= SHORT_DIFFERENCING:
        best, time = _pick_better(problem, best, time, difference(problem, 1), target)
    # 3. Longest first, the usual start.
    if is_small or time > target * (1 + GOOD):
        start = place_longest_first(problem, target)
        if time == NO_CAP:
            best = start  # even where it leaves samples without a place
        best, time = _pick_better(problem, best, time, start, target)
    # 4. Differencing with equal sizes, if all that was worse.
    if time > max(least, target):
        if equal_sizes is None:
            equal_sizes = difference(problem, num_parts)
        least = problem.time_within_limits(equal_sizes)
        if time == NO_CAP:
            best, time = _pick_better(problem, best, time, equal_sizes, target)
        elif least < time:
            best = equal_sizes  # refining it would take longer than all before
    return best


def _pick_better(
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
            start = _match_speeds(problem, start)
            start_time = refine_within(problem, start, target)
    return (start, start_time) if start_time < time else (best, time)


def _match_speeds(problem: Problem, part_of: np.ndarray) -> np.ndarray:
    """The same partition, its parts renumbered: the heavier, the faster. No time is longer than before."""
    by_load = np.argsort(-sum_per_part(problem.work, part_of, problem.num_parts), kind="stable")
    number = np.empty_like(by_load)
    number[by_load] = np.argsort(-problem.speeds, kind="stable")
    return number[part_of]


def without_home(problem: Problem) -> Samples:
    """The samples of a problem, of which none has a home."""
    return Samples(problem.work, problem.tokens, np.full_like(problem.work, NONE), 0 * problem.work)


def place_longest_first(problem: Problem, time: int) -> np.ndarray:
    """int64 `[samples]`, the part of each; NONE where none had a place. Parts have limits as of `time`."""
    part_of = np.full_like(problem.work, NONE)
    place(without_home(problem), problem.limits(time), part_of, False)
    return part_of


def refine_within(problem: Problem, part_of: np.ndarray, target: int) -> int:
    """Changes `part_of` until no part takes longer than the target, or nothing helps; returns the longest."""
    return lower(without_home(problem), part_of, target, problem.limits, problem.time)


def lower(
    samples: Samples,
    part_of: np.ndarray,
    target: int,
    limits_of: Callable[[int], Limits],
    time_of: Callable[[np.ndarray], int],
) -> int:
    """Changes `part_of` to lower its time to the target, or as far as swaps do; returns its time.

    Where the target is out of reach, the middle between it and the best so far is tried next, and so on.

    Args:
        limits_of: returns the limits that a time sets to parts.
        time_of: returns the time of int64 `[samples]`, the part of each.
    """
    time = time_of(part_of)
    tried, failed = target + int(NEXT_TO * max(time, 0)), target
    for number in range(MAX_TRIED_TIMES):
        if time <= target or (number > 0 and time - failed <= RESOLUTION * abs(time)):
            break
        tried = min(tried, time - 1)
        found = part_of.copy()
        settle(samples, limits_of(tried), found, True, 1, NO_CAP)
        reached = time_of(found)
        if reached < time:
            part_of[:] = found
            time = reached
        if reached > tried:
            failed = tried
        tried = failed + (time - failed) // 2
    return time
