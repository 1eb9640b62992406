"""Several consecutive steps planned together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from commons.partition.problem import Problem
from commons.partition.search import Limits, place_longest_first, refine_to, sum_per_part
from commons.partition.workloads import as_workloads, check_count

# A step with giants in it leaves its other parts at least this share of the mean load: the light samples that
# it takes to fill less are also wanted next to the giants.
LEAST_FILL = 0.2
# The search may end a little above its targets: these leave room for that, and more if it was not enough.
MARGINS = (0.998, 0.99, 0.97, 0.9)


def balance_window(
    workloads: ArrayLike,
    num_partitions: int,
    num_steps: int,
    max_step_ratio: float | None = None,
    equal_size: bool = True,
) -> list[list[np.ndarray]]:
    """Divides the samples of `num_steps` global batches into as many steps of `num_partitions` parts each.

    Minimised is what the steps take together, the sum of each one's largest load. A single step cannot be
    faster than its largest sample; here samples that large come into one step, whose other parts get more to
    do than in the others.

    Every step gets a target for its parts, from the first, which takes the largest samples, to the last; the
    samples are placed longest first by what is missing to the target, and refined. Where the same targets for
    all steps come out better, or consecutive samples in each, if the parts are equal then, these are taken.

    Args:
        workloads: `[samples]` of all steps, non-negative.
        num_partitions: parts of a step, at least 1.
        num_steps: at least 1.
        max_step_ratio: a step's total is at most this times the mean step's, at least 1; None for no limit.
            A limit that whole samples cannot keep gives way, as for one giant that is above it alone:
            `step_ratios` tells.
        equal_size: whether sizes of all parts of all steps differ by at most one.

    Returns:
        For each step and part the ascending int64 indices of its samples. Equal input gives equal output on
        every machine.

    Raises:
        ValueError: a workload is negative, NaN or infinite; a count is below 1, or `max_step_ratio` is.
    """
    check_count("num_steps", num_steps)
    check_count("num_partitions", num_partitions)
    if max_step_ratio is not None and not max_step_ratio >= 1:
        raise ValueError(f"max_step_ratio is {max_step_ratio}, expected at least 1, or None for no limit")
    problem = Problem.of(workloads, num_partitions * num_steps, equal_size)
    limit = np.inf if max_step_ratio is None else max_step_ratio
    planned = _plans(problem, np.zeros((num_steps, num_partitions)))  # all steps alike
    if len(problem.work) % (num_steps * num_partitions) == 0:
        planned.append(_separate_steps(problem, num_partitions, num_steps))
    for margin in MARGINS:
        targets = _targets(problem, num_partitions, num_steps, max(limit * margin, 1.0))
        as_targeted, sorted_by_load = _plans(problem, targets)
        planned += [as_targeted, sorted_by_load]
        if as_targeted.ratio <= limit:
            break
    best = min(planned, key=lambda plan: plan.rank(limit))
    parts = problem.partition(best.part_of)
    return [parts[start : start + num_partitions] for start in range(0, len(parts), num_partitions)]


def step_ratios(workloads: ArrayLike, window: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """float64 `[steps]`: each step's total ÷ the mean step's, of a window as `balance_window` returns it."""
    values = as_workloads(workloads)
    totals = np.array([sum(values[part].sum() for part in step) for step in window])
    return totals / totals.mean() if totals.any() else np.ones(len(totals))


@dataclass(frozen=True)
class _Planned:
    """A window: its parts, step by step, the sum of its steps' largest loads, and its largest step ratio."""

    part_of: np.ndarray
    time: int
    ratio: float

    def rank(self, limit: float) -> tuple[bool, float]:
        """Smaller is better: within the limit by time, beyond it by how far."""
        return (False, self.time) if self.ratio <= limit else (True, self.ratio)


def _targets(problem: Problem, num_partitions: int, num_steps: int, max_ratio: float) -> np.ndarray:
    """float64 `[steps, parts]`: the load each part should get; only giants take steps above the ratio."""
    work, rows = problem.work, problem.limits.fewest
    left = int(work.sum())
    limit = max_ratio * left / num_steps if left else 0.0
    # What comes to a giant's part with it: an equal share of the lightest samples.
    num_giants = max(int(np.searchsorted(-work, -left / (num_partitions * num_steps))), 1)
    lightest = work[max(len(work) - num_giants * (rows - 1), 0) :] if rows > 1 else work[:0]
    with_fill = np.append(work + int(lightest.sum()) // num_giants, np.zeros(num_partitions, dtype=np.int64))
    targets = np.empty((num_steps, num_partitions))
    first = 0  # of the samples that are in no step yet
    for step in range(num_steps):
        mean = left / (num_partitions * (num_steps - step))
        largest = int(with_fill[first])
        if largest <= mean:
            targets[step:] = mean
            break
        total = int(min(num_partitions * largest, limit, left))
        targets[step] = total / num_partitions
        placed = num_partitions
        if total < min(num_partitions * largest, left):  # the limit forbids to fill all parts to the largest
            giants = with_fill[first : first + num_partitions]
            number = _parts_with_giants(giants, total, LEAST_FILL * mean)
            total = max(total, int(giants[:number].sum()))
            others = (total - int(giants[:number].sum())) / max(num_partitions - number, 1)
            targets[step, :number], targets[step, number:] = giants[:number], others
            if number < num_partitions and giants[number] > others:
                placed = number  # the next do not fit into this step
        left = max(left - total, 0)
        first = min(first + placed, len(work))
    return targets


def _parts_with_giants(giants: np.ndarray, total: int, least: float) -> int:
    """How many parts of a step get a giant of their own: those above what the others then get, which is at
    least `least`; `giants` int64 `[parts]`, descending."""
    number = 1
    sums = np.cumsum(giants)
    while number < len(giants) - 1:
        others = (total - sums[number]) / (len(giants) - number - 1)
        if giants[number] <= (total - sums[number - 1]) / (len(giants) - number) or others < least:
            break
        number += 1
    return number


def _plans(problem: Problem, targets: np.ndarray) -> list[_Planned]:
    """Places the samples so that loads come near the targets `[steps, parts]`.

    Returns:
        The parts in the steps of their targets; and sorted by their loads, so that the heaviest share a step,
        which takes no longer, but may make one step larger than it should be.
    """
    # With what its target lacks to the largest as a load from the start, all parts have the same target.
    base = np.rint(targets.max() - targets).astype(np.int64).ravel()
    part_of = _place(problem.work, problem.tokens, base, problem.limits, int(targets.max()))
    loads = sum_per_part(problem.work, part_of, len(base))
    by_load = np.argsort(-loads, kind="stable")
    place = np.empty_like(by_load)
    place[by_load] = np.arange(len(by_load))
    return [
        _planned(part_of, loads.reshape(targets.shape)),
        _planned(place[part_of], loads[by_load].reshape(targets.shape)),
    ]


def _separate_steps(problem: Problem, num_partitions: int, num_steps: int) -> _Planned:
    """Consecutive samples make a step, as without a window, so that a window is not worse than none."""
    step_of = problem.order // max(len(problem.work) // num_steps, 1)
    part_of = np.empty(len(problem.work), dtype=np.int64)
    no_load = np.zeros(num_partitions, dtype=np.int64)
    for step in range(num_steps):
        samples = np.flatnonzero(step_of == step)
        placed = _place(problem.work[samples], problem.tokens[samples], no_load, problem.limits, 0)
        part_of[samples] = step * num_partitions + placed
    loads = sum_per_part(problem.work, part_of, num_steps * num_partitions)
    return _planned(part_of, loads.reshape(num_steps, num_partitions))


def _planned(part_of: np.ndarray, loads: np.ndarray) -> _Planned:
    """`loads` int64 `[steps, parts]`: sums are exact, so no machine's way of adding decides between plans."""
    totals = loads.sum(1)
    total = int(totals.sum())
    ratio = int(totals.max()) * len(totals) / total if total else 1.0
    return _Planned(part_of, int(loads.max(1).sum()), ratio)


def _place(work: np.ndarray, tokens: np.ndarray, base: np.ndarray, limits: Limits, target: int) -> np.ndarray:
    part_of = place_longest_first(work, tokens, base, limits)
    refine_to(work, tokens, part_of, base, limits, target)
    return part_of
