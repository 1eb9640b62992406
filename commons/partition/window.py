"""Several consecutive steps planned together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from .kernels import sum_per_part
from .problem import Problem, are_unequal, indices_of_parts, longest_time
from .refined import best_from_scratch, lower_within, place_longest_first
from .workloads import as_speeds, as_workloads, check_count

# A step with giants leaves its other parts at least this share of the mean load. Less would take the lightest
# samples, which are also wanted next to the giants.
LEAST_FILL = 0.2
# Targets are this share of the limit, because the search may end a little above them; smaller ones are tried
# where that was not enough.
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
    """Divides the samples of `num_steps` global batches into as many steps of `num_partitions` parts each.

    Minimizes the time of all steps together: the sum of each step's largest load ÷ speed. A single step
    cannot be faster than its largest sample. In a window, samples that large share one step, and the other
    parts of that step get more to do than in other steps.

    Every step gets a target load for its parts, from the first step, which takes the largest samples, to the
    last. Samples are placed longest first by what is missing to the target, and refined. Two other plans are
    taken where they come out better: the same target for all steps, and consecutive samples in each step.
    If none keeps the limit, samples are divided among steps evenly, and then among parts.

    Args:
        workloads: Costs of the samples of all steps, `[samples]`, non-negative.
        num_partitions, speeds: Parts of a step, as for `longest_processing_time`.
        num_steps: Number of steps, at least 1.
        max_step_ratio: Largest total of a step ÷ the mean step's, at least 1; None for no limit. The limit
            gives way where whole samples cannot keep it, such as to a giant that is above it alone.
            `step_ratios` tells what was reached.
        equal_size: True for sizes of all parts of all steps that differ by at most one.

    Returns:
        Indices of the samples of each step and part, int64, ascending.

    Raises:
        ValueError: As `longest_processing_time`. Or `num_steps` or `max_step_ratio` is below 1.
    """
    check_count("num_steps", num_steps)
    check_count("num_partitions", num_partitions)
    num_steps, num_partitions = int(num_steps), int(num_partitions)  # narrower ones would overflow
    if max_step_ratio is not None and not max_step_ratio >= 1:
        raise ValueError(f"max_step_ratio is {max_step_ratio}, expected at least 1, or None for no limit")
    tiled = np.tile(as_speeds(speeds, num_partitions), num_steps)
    problem = Problem.of(workloads, num_partitions * num_steps, equal_size, speeds=tiled)
    limit = np.inf if max_step_ratio is None else max_step_ratio
    plans = _make_plans(problem, np.zeros((num_steps, num_partitions)))  # all steps alike
    if num_steps == 1 or len(problem.work) % (num_steps * num_partitions) == 0:
        step_of = problem.order // max(len(problem.work) // num_steps, 1)
        plans.append(_plan_each_step(problem, step_of, num_partitions, equal_size))
    for margin in MARGINS:
        targets = _set_targets(problem, num_partitions, num_steps, max(limit * margin, 1.0))
        found = _make_plans(problem, targets)
        plans += found
        is_beyond, _ = _rank(problem, found[0], num_steps, limit)
        if not is_beyond:
            break
    best = min(plans, key=lambda plan: _rank(problem, plan, num_steps, limit))
    if _rank(problem, best, num_steps, limit)[0]:  # beyond it
        fewest, most = problem.fewest * num_partitions, problem.most * num_partitions
        steps = replace(problem, speeds=np.ones(num_steps), fewest=fewest, most=most)
        even = _plan_each_step(problem, best_from_scratch(steps, 0.0), num_partitions, equal_size)
        best = min(best, even, key=lambda plan: _rank(problem, plan, num_steps, limit))
    parts = indices_of_parts(problem.unsort(best), problem.num_parts)
    return [parts[start : start + num_partitions] for start in range(0, len(parts), num_partitions)]


def step_ratios(workloads: ArrayLike, window: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """float64 `[steps]`: each step's total ÷ the mean step's, of a window as `balance_window` returns it."""
    values = as_workloads(workloads)
    totals = np.array([sum(values[part].sum() for part in step) for step in window])
    return totals / totals.mean() if totals.any() else np.ones(len(totals))


def _rank(problem: Problem, part_of: np.ndarray, num_steps: int, limit: float) -> tuple[bool, float]:
    """The smaller, the better the plan: by time within the limit, by the largest ratio beyond it."""
    loads = sum_per_part(problem.work, part_of, problem.num_parts).reshape(num_steps, -1)
    totals = loads.sum(1)
    times = [longest_time(step_loads, problem.speeds[: len(step_loads)]) for step_loads in loads]
    total = int(totals.sum())
    ratio = int(totals.max()) * num_steps / total if total else 1.0
    return (False, sum(times)) if ratio <= limit else (True, ratio)


def _set_targets(problem: Problem, num_partitions: int, num_steps: int, max_ratio: float) -> np.ndarray:
    """float64 `[steps, parts]`: the target load of each part; only giants take steps above the ratio.

    Example: two steps of 4 parts share a load of 400, in it a giant of 100, under a ratio of 1.25. The first
    step may have 250: its targets are 100 for the giant, and 50 each for the rest. The second step gets 37.5
    for each part.
    """
    work, rows = problem.work, problem.fewest
    left = int(work.sum())
    limit = max_ratio * left / num_steps if left else 0.0
    # 1. A giant's part also gets an equal share of the lightest samples.
    num_giants = max(int(np.searchsorted(-work, -left / (num_partitions * num_steps))), 1)
    lightest = work[max(len(work) - num_giants * (rows - 1), 0) :] if rows > 1 else work[:0]
    with_fill = np.append(work + int(lightest.sum()) // num_giants, np.zeros(num_partitions, dtype=np.int64))
    targets = np.empty((num_steps, num_partitions))
    first = 0  # of the samples that are in no step yet
    for step in range(num_steps):
        # 2. Without giants, all further steps are alike.
        mean = left / (num_partitions * (num_steps - step))
        largest = int(with_fill[first])
        if largest <= mean:
            targets[step:] = mean
            break
        # 3. Else all parts get as much as the largest sample.
        total = int(min(num_partitions * largest, limit, left))
        targets[step] = total / num_partitions
        placed = num_partitions
        # 4. Where the ratio, or what is left, is too small for that, some parts have a giant each, and the
        # others share the rest.
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
    """Counts giants above the load of the other parts, at least `least`; int64 `[parts]`, descending."""
    number = 1
    sums = np.cumsum(giants)
    while number < len(giants) - 1:
        others = (total - sums[number]) / (len(giants) - number - 1)
        if giants[number] <= (total - sums[number - 1]) / (len(giants) - number) or others < least:
            break
        number += 1
    return number


def _make_plans(problem: Problem, targets: np.ndarray) -> list[np.ndarray]:
    """Plans, int64 `[samples]` each, whose loads come near the targets `[steps, parts]`.

    Every part is in the step of its target; where parts are equally fast, a second plan sorts them by load,
    so that the heaviest share a step. That takes no longer, but may make one step too large.
    """
    if are_unequal(problem.speeds):
        speeds = problem.speeds[: targets.shape[1]]
        targets = np.array([_adapt_to_speeds(step_targets, speeds) for step_targets in targets])
    loads = np.rint(targets).astype(np.int64).ravel()
    # Times are what loads are above their targets.
    above = replace(problem, speeds=np.ones(len(loads)), given=-loads)
    part_of = place_longest_first(above, 0)
    lower_within(above, part_of, 0)
    if are_unequal(problem.speeds):
        return [part_of]
    loads = sum_per_part(problem.work, part_of, problem.num_parts)
    number = np.empty_like(loads)
    number[np.argsort(-loads, kind="stable")] = np.arange(len(number))
    return [part_of, number[part_of]]


def _adapt_to_speeds(targets: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """float64 `[parts]` of a step: giants on the fastest parts, the rest in proportion to their speeds."""
    placed = np.empty_like(targets)
    placed[np.argsort(-speeds, kind="stable")] = np.sort(targets)[::-1]
    others = placed == targets.min()
    placed[others] *= speeds[others] / (math.fsum(speeds[others]) / others.sum())  # exact on every processor
    return placed


def _plan_each_step(
    problem: Problem, step_of: np.ndarray, num_partitions: int, equal_size: bool
) -> np.ndarray:
    """Plans the samples of each step as without a window; `step_of` int64 `[samples]`, from 0 on."""
    part_of = np.empty(len(problem.work), dtype=np.int64)
    for step in np.unique(step_of):
        samples = np.flatnonzero(step_of == step)
        work, tokens, count = problem.work[samples], problem.tokens[samples], len(samples)
        sizes = (count // num_partitions, -(-count // num_partitions)) if equal_size else (0, count)
        one_step = Problem(problem.speeds[:num_partitions], samples, work, tokens, *sizes)
        part_of[samples] = step * num_partitions + best_from_scratch(one_step, 0.0)
    return part_of
