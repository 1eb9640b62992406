"""Partitions from scratch: placed longest first, then leveled by swaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from .karmarkar_karp import bound_differencing, difference
from .kernels import NO_CAP, NONE, Samples, level, place, sum_per_part
from .problem import Problem, are_unequal, in_lists, indices_of_parts, number_of_part
from .token_levels import level_tokens
from .workloads import check_tolerance

# Largest number of target times to try, so that a search for a target out of reach ends.
MAX_TRIED_TIMES = 5
# Shares of a time: a search first tries NEXT_TO above the target, and ends within RESOLUTION of a failure.
# "Plans at size" (Yambda-5B, 1,024 ranks, refined) decides both.
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
        workloads: Cost of each sample, `[samples]`, non-negative.
        num_partitions: Number of parts, at least 1.
        equal_size: True for part sizes that differ by at most one; False for sizes that follow the load.
        tokens: Number of tokens of each sample, `[samples]`, whole numbers.
        max_tokens: Largest number of tokens in a part. If a sample then has no place, the samples are
            balanced by tokens instead.
        speeds: Speed of each part, above 0, in any unit, `[parts]`. Times, load ÷ speed, are then balanced
            instead of loads. None means equal speeds.

    Returns:
        Indices of the samples of each part, int64, ascending.

    Raises:
        ValueError: A value is negative, NaN, or infinite; `num_partitions` is below 1; `speeds` does not have
            one number above 0 for each part; or no placement within the caps exists, or none is found.
            The last error names a sample without a place.
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
    """Runs `longest_processing_time`, then `refine`, for the best balance of all functions here.

    If that misses the tolerance, equal-size `karmarkar_karp` is refined as well, and the better one counts.

    Arguments, result, and errors are those of the two functions; `token_tolerance` is that of `rebalance`.
    """
    tolerance = check_tolerance(tolerance)
    problem = Problem.of(workloads, num_partitions, equal_size, tokens, max_tokens, speeds, token_tolerance)
    part_of = place_from_scratch(problem, tolerance)
    if problem.token_tolerance is not None:
        level_tokens(problem, without_home(problem), part_of, [problem.target(tolerance)])
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

    If part sizes allow it, a swap may move one sample and return none. The result is never worse than
    `partition`, and within about 1e-4 of the best that the swaps can reach.

    Arguments and result are those of `longest_processing_time`, and `partition` has the form of its result.
    The search stops once the largest load ÷ speed is at most (1 + tolerance) × the lower bound.

    Raises:
        ValueError: `longest_processing_time` rejects an argument; `tolerance` is negative; or `partition`
            does not hold each sample once, or breaks the limits.
    """
    tolerance = check_tolerance(tolerance)
    problem = Problem.of(workloads, len(partition), equal_size, tokens, max_tokens, speeds)
    part_of = problem.sort(number_of_part(partition, len(problem.work)))
    if fault := problem.fault(part_of):
        raise ValueError(fault)
    lower_within(problem, part_of, problem.target_near_home(tolerance))
    return indices_of_parts(problem.unsort(part_of), problem.num_parts)


def place_from_scratch(problem: Problem, tolerance: float | None = None) -> np.ndarray:
    """Returns parts, int64 `[samples]`: longest first, else by tokens, and refined if `tolerance` is given.
    Raises ValueError if neither start keeps to `max_tokens`."""
    if tolerance is None:
        part_of = place_longest_first(problem, problem.target(0.0))
    else:
        part_of = best_from_scratch(problem, tolerance)
    if (part_of == NONE).any():
        unplaced, tokens = int(np.argmax(part_of == NONE)), problem.by_tokens()
        part_of = tokens.unsort(best_from_scratch(tokens, 0.0))
        if problem.fault(part_of) is not None:
            raise ValueError(
                f"no placement under max_tokens={problem.max_tokens} was found: sample "
                f"{problem.order[unplaced]} with {problem.tokens[unplaced]} tokens fits in none of "
                f"{problem.num_parts} parts next to the others; raise max_tokens, or use more parts"
            )
        if tolerance is not None:
            lower_within(problem, part_of, problem.target(tolerance))
    return part_of


def best_from_scratch(problem: Problem, tolerance: float) -> np.ndarray:
    """Returns each sample's part, int64 `[samples]`, refined; NONE for samples without a place.

    The result meets the target, or is no worse than equal-size differencing, if that keeps to the limits.
    """
    target = problem.target(tolerance)
    part_of = place_longest_first(problem, target)
    time = problem.time_within_limits(part_of)
    if target < time < NO_CAP:
        time = lower_within(problem, part_of, target)
        if time > target and are_unequal(problem.speeds):  # larger loads on faster parts never take longer
            by_load = np.argsort(-sum_per_part(problem.work, part_of, problem.num_parts), kind="stable")
            number = np.empty_like(by_load)
            number[by_load] = np.argsort(-problem.speeds, kind="stable")
            part_of = number[part_of]
            time = lower_within(problem, part_of, target)
    if time > target and time > bound_differencing(problem.work, problem.num_parts):
        start = difference(problem, problem.num_parts)
        if problem.fault(start) is None:
            is_stuck = time > (1 + RESOLUTION) * target
            if (lower_within(problem, start, target) if is_stuck else problem.time(start)) < time:
                return start
    return part_of


def without_home(problem: Problem) -> Samples:
    """Returns the samples of a problem without homes, so that moves are free."""
    return Samples(problem.work, problem.tokens, np.full_like(problem.work, NONE), 0 * problem.work)


def place_longest_first(problem: Problem, time: int) -> np.ndarray:
    """Places samples longest first, under the limits for `time`: int64 `[samples]`, NONE for no place."""
    part_of = np.full_like(problem.work, NONE)
    place(without_home(problem), problem.limits(time), part_of, False)
    return part_of


def lower_within(problem: Problem, part_of: np.ndarray, target: int) -> int:
    """Changes `part_of` until the target is met, or nothing helps. Returns the longest time.

    If the target is out of reach, the middle between it and the best time is tried next, and so on.
    """
    samples, time = without_home(problem), problem.time(part_of)
    tried, failed = target + int(NEXT_TO * time), target
    for number in range(MAX_TRIED_TIMES):
        if time <= target or (number > 0 and time - failed <= RESOLUTION * time):
            break
        tried = min(tried, time - 1)
        found = part_of.copy()
        level(samples, problem.limits(tried), found, NO_CAP)
        reached = problem.time(found)
        if reached < time:
            part_of[:], time = found, reached
        if reached > tried:
            failed = tried
        tried = failed + (time - failed) // 2
    return time
