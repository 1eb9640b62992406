"""Plans several consecutive steps together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from ...partition.kernels import sum_per_part
from ...partition.problem import Problem, are_unequal, indices_of_parts
from ...partition.refined import best_from_scratch, lower_within, place_longest_first
from ...partition.workloads import as_speeds, as_workloads, check_count

# Giants are samples above the mean load. A step with giants leaves its other parts at least this share of the
# mean. Less would use up the lightest samples, which are also wanted next to the giants.
LEAST_FILL = 0.2
# Smallest target ÷ largest target. A part without a target load may get samples of no cost.
LEAST_SPEED = 1e-6
# Targets are this share of the limit, because the search may end slightly above them. Smaller shares are
# tried if that was not enough.
MARGINS = (0.998, 0.99, 0.97, 0.9)


def balance_window(
    workloads: ArrayLike,
    num_partitions: int,
    num_steps: int,
    max_step_ratio: float | None = None,
    equal_size: bool = True,
    *,
    speeds: ArrayLike | None = None,
) -> list[list[np.ndarray]]:
    """Divides the samples of `num_steps` global batches into `num_steps` steps of `num_partitions` parts.

    Minimizes the total time: the sum over all steps of the largest load ÷ speed. A single step cannot be
    faster than its largest sample. In a window, the largest samples share a step, and the other parts of
    that step get more work than in other steps. With heavy tails, two steps are enough for nearly equal
    loads, and more steps help if `max_step_ratio` is small.

    Every part of every step gets a target load, and the first step takes the largest samples. Samples are
    placed longest first, each in the part furthest below its target, and swaps refine the result. Two other
    plans win if they are better: one target for all steps and, if samples divide evenly, consecutive samples
    in each step.
    If no plan keeps the limit, samples are divided evenly among steps, and then among the parts of a step.

    Provisional: may change in a minor version.

    Args:
        workloads: Cost of each sample of all steps, `[samples]`, non-negative.
        num_partitions, speeds: Number of parts in a step, and their speeds, as in `longest_processing_time`.
        num_steps: Number of steps, at least 1.
        max_step_ratio: Largest load of a whole step ÷ the mean over steps, at least 1. None means no limit.
            The limit gives way if whole samples cannot keep it, for example if one sample is above it.
            `step_ratios` returns the ratios reached.
        equal_size: True for part sizes that differ by at most one across all steps.

    Returns:
        Indices of the samples of each step and part, int64, ascending.

    Raises:
        ValueError: `longest_processing_time` rejects an argument; `num_steps` or `max_step_ratio` is below 1.
    """
    check_count("num_steps", num_steps)
    check_count("num_partitions", num_partitions)
    num_steps, num_partitions = int(num_steps), int(num_partitions)  # narrow integers would overflow
    if max_step_ratio is not None and not max_step_ratio >= 1:
        raise ValueError(f"max_step_ratio is {max_step_ratio}, expected at least 1, or None for no limit")
    tiled = np.tile(as_speeds(speeds, num_partitions), num_steps)
    problem = Problem.of(workloads, num_partitions * num_steps, equal_size, speeds=tiled)
    limit = np.inf if max_step_ratio is None else max_step_ratio
    plans = _make_plans(problem, np.zeros((num_steps, num_partitions)))  # equal targets
    if num_steps == 1 or len(problem.work) % (num_steps * num_partitions) == 0:
        step_of = problem.order // max(len(problem.work) // num_steps, 1)
        plans.append(_plan_each_step(problem, step_of, num_partitions, equal_size))
    for margin in MARGINS:
        targets = _set_targets(problem, num_partitions, num_steps, max(limit * margin, 1.0))
        found = _make_plans(problem, targets)
        plans += found
        if not _rank(problem, found[0], num_steps, limit)[0]:  # within the limit
            break
    best = min(plans, key=lambda plan: _rank(problem, plan, num_steps, limit))
    if _rank(problem, best, num_steps, limit)[0]:  # beyond the limit
        fewest, most = problem.fewest * num_partitions, problem.most * num_partitions
        steps = replace(problem, speeds=np.ones(num_steps), fewest=fewest, most=most)
        even = _plan_each_step(problem, best_from_scratch(steps, 0.0), num_partitions, equal_size)
        best = min(best, even, key=lambda plan: _rank(problem, plan, num_steps, limit))
    parts = indices_of_parts(problem.unsort(best), problem.num_parts)
    return [parts[start : start + num_partitions] for start in range(0, len(parts), num_partitions)]


def step_ratios(workloads: ArrayLike, window: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Returns each step's load ÷ the mean, float64 `[steps]`. `window` is a result of `balance_window`.

    Provisional: may change in a minor version.
    """
    values = as_workloads(workloads)
    totals = np.array([sum(values[part].sum() for part in step) for step in window])
    return totals / totals.mean() if totals.any() else np.ones(len(totals))


def _rank(problem: Problem, part_of: np.ndarray, num_steps: int, limit: float) -> tuple[bool, float]:
    """Returns a sort key, the smaller the better: time if within the limit, else the largest ratio."""
    loads = sum_per_part(problem.work, part_of, problem.num_parts)
    times = (loads / problem.speeds).reshape(num_steps, -1).max(1).astype(np.int64)
    totals = loads.reshape(num_steps, -1).sum(1)
    total = int(totals.sum())
    ratio = int(totals.max()) * num_steps / total if total else 1.0
    return (False, int(times.sum())) if ratio <= limit else (True, ratio)


def _set_targets(problem: Problem, num_partitions: int, num_steps: int, max_ratio: float) -> np.ndarray:
    """Returns target loads, float64 `[steps, parts]`. Only giants take a step above the ratio.

    Example: two steps of 4 parts share a load of 400, which includes a giant of 100, under a ratio of 1.25.
    The first step may have 250, so its targets are 100 for the giant's part and 50 for each other part. Each
    part of the second step gets 37.5.
    """
    work, rows = problem.work, problem.fewest
    left = int(work.sum())
    limit = max_ratio * left / num_steps if left else 0.0
    # 1. A giant's part also gets an equal share of the lightest samples, to fill its rows.
    num_giants = max(int(np.searchsorted(-work, -left / (num_partitions * num_steps))), 1)
    lightest = work[max(len(work) - num_giants * (rows - 1), 0) :] if rows > 1 else work[:0]
    with_fill = np.append(work + int(lightest.sum()) // num_giants, np.zeros(num_partitions, dtype=np.int64))
    targets = np.empty((num_steps, num_partitions))
    first = 0  # index of the first sample in no step yet
    for step in range(num_steps):
        # 2. Without giants, all remaining steps are alike.
        mean = left / (num_partitions * (num_steps - step))
        largest = int(with_fill[first])
        if largest <= mean:
            targets[step:] = mean
            break
        # 3. Otherwise, all parts get as much as the largest sample, if ratio and remaining load allow it.
        total = int(min(num_partitions * largest, limit, left))
        targets[step] = total / num_partitions
        placed = num_partitions
        # 4. If the ratio does not allow it, some parts have a giant each, and the others share the rest.
        if total < min(num_partitions * largest, left):
            giants = with_fill[first : first + num_partitions]
            number = _count_giants(giants, total, LEAST_FILL * mean)
            total = max(total, int(giants[:number].sum()))
            others = (total - int(giants[:number].sum())) / max(num_partitions - number, 1)
            targets[step, :number], targets[step, number:] = giants[:number], others
            if number < num_partitions and giants[number] > others:
                placed = number  # the other giants do not fit into this step
        left = max(left - total, 0)
        first = min(first + placed, len(work))
    return targets


def _count_giants(giants: np.ndarray, total: int, least: float) -> int:
    """Counts the descending `giants` above an equal share of the rest. Other parts keep at least `least`."""
    number = 1
    sums = np.cumsum(giants)
    while number < len(giants) - 1:
        others = (total - sums[number]) / (len(giants) - number - 1)
        if giants[number] <= (total - sums[number - 1]) / (len(giants) - number) or others < least:
            break
        number += 1
    return number


def _make_plans(problem: Problem, targets: np.ndarray) -> list[np.ndarray]:
    """Returns plans, int64 `[samples]` each, with loads near the targets `[steps, parts]`.

    In the first plan, every part is in the step of its target. If parts are equally fast, a second plan sorts
    parts by load, so that the heaviest share a step. That takes no longer, but may make a step too large.
    """
    speeds = problem.speeds[: targets.shape[1]]
    targets = np.concatenate([_adapt_to_speeds(step_targets, speeds) for step_targets in targets])
    # A part that should take more work in the same time is a faster part.
    longest = max(int(np.ceil(targets.max())), 1)
    by_targets = replace(problem, speeds=np.maximum(targets / longest, LEAST_SPEED))
    part_of = place_longest_first(by_targets, longest)
    lower_within(by_targets, part_of, longest)
    if are_unequal(problem.speeds):
        return [part_of]
    loads = sum_per_part(problem.work, part_of, problem.num_parts)
    number = np.empty_like(loads)
    number[np.argsort(-loads, kind="stable")] = np.arange(len(number))
    return [part_of, number[part_of]]


def _adapt_to_speeds(targets: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """Returns targets, float64 `[parts]`: giants on the fastest parts, the others proportional to speed."""
    placed = np.empty_like(targets)
    placed[np.argsort(-speeds, kind="stable")] = np.sort(targets)[::-1]
    others = placed == targets.min()
    placed[others] *= speeds[others] / (math.fsum(speeds[others]) / others.sum())  # fsum is exact everywhere
    return placed


def _plan_each_step(
    problem: Problem, step_of: np.ndarray, num_partitions: int, equal_size: bool
) -> np.ndarray:
    """Plans each step by itself, without a window. `step_of`, int64 `[samples]`, counts from 0."""
    part_of = np.empty(len(problem.work), dtype=np.int64)
    for step in np.unique(step_of):
        samples = np.flatnonzero(step_of == step)
        work, tokens, count = problem.work[samples], problem.tokens[samples], len(samples)
        sizes = (count // num_partitions, -(-count // num_partitions)) if equal_size else (0, count)
        one_step = Problem(problem.speeds[:num_partitions], samples, work, tokens, *sizes)
        part_of[samples] = step * num_partitions + best_from_scratch(one_step, 0.0)
    return part_of
