"""Partitions from scratch: longest first, and refined by local search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from commons.partition.compiled import compiled
from commons.partition.local_search import improve, target_load
from commons.partition.longest_first import place_longest_first
from commons.partition.parts import NONE, Limits, make_parts
from commons.partition.problem import NO_CAP, Problem, checked_tolerance, number_of_part


def longest_processing_time(
    workloads: ArrayLike,
    num_partitions: int,
    equal_size: bool = True,
    *,
    max_rows: int | None = None,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
) -> list[np.ndarray]:
    """Places each sample, the heaviest first, in the lightest part that can take it.

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.

    Args:
        workloads: `[samples]`, non-negative.
        num_partitions: parts, at least 1.
        equal_size: part sizes differ by at most one; else sizes follow the load.
        max_rows: samples of a part at most.
        tokens: `[samples]`, whole numbers: a second quantity, of which a part has at most `max_tokens`.
        max_tokens: see `tokens`.

    Returns:
        For each part the ascending int64 indices of its samples. Ties are broken by index, so equal input
        gives equal output on every machine. If the caps leave a sample without a place, the samples are
        balanced by their tokens instead.

    Raises:
        ValueError: a value is negative, NaN or infinite; `num_partitions` is below 1; or the caps cannot be
            held, or no placement that holds them was found: then a sample that fits nowhere is named.
    """
    problem = Problem.of(workloads, num_partitions, equal_size, max_rows, tokens, max_tokens)
    return problem.partition(start_from_scratch(problem))


def refined(
    workloads: ArrayLike,
    num_partitions: int,
    equal_size: bool = True,
    *,
    tolerance: float = 0.0,
    max_rows: int | None = None,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
) -> list[np.ndarray]:
    """`longest_processing_time`, then `refine`: the best balance there is here. Arguments as for these."""
    tolerance = checked_tolerance(tolerance)
    problem = Problem.of(workloads, num_partitions, equal_size, max_rows, tokens, max_tokens)
    if max_tokens is None:
        part_of = _refined(problem.work, problem.tokens, problem.num_parts, problem.limits, tolerance)
    else:
        part_of = start_from_scratch(problem)
        _refine(problem.work, problem.tokens, part_of, problem.num_parts, problem.limits, tolerance)
    return problem.partition(part_of)


def refine(
    workloads: ArrayLike,
    partition: Sequence[ArrayLike],
    tolerance: float = 0.0,
    equal_size: bool = True,
    *,
    max_rows: int | None = None,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
) -> list[np.ndarray]:
    """Exchanges samples between heavy and light parts until the tolerance is met or no exchange helps.

    An exchange swaps two samples, or moves one where part sizes allow it; it counts as a help if it takes at
    least 3e-5 of the mean load off the heaviest part. The result is never worse than `partition`.

    Args:
        workloads: `[samples]`, non-negative.
        partition: for each part the indices of its samples; each sample is in one part.
        tolerance: the largest load may be (1 + tolerance) × the lower bound.
        equal_size, max_rows, tokens, max_tokens: as for `longest_processing_time`; `partition` has to keep to
            them, too.

    Returns:
        As `longest_processing_time`.

    Raises:
        ValueError: also if `partition` is none of these samples, or does not keep to the limits.
    """
    tolerance = checked_tolerance(tolerance)
    problem = Problem.of(workloads, len(partition), equal_size, max_rows, tokens, max_tokens)
    part_of = problem.sorted(number_of_part(partition, len(problem.work)))
    problem.check_keeps_limits(part_of)
    _refine(problem.work, problem.tokens, part_of, problem.num_parts, problem.limits, tolerance)
    return problem.partition(part_of)


def start_from_scratch(problem: Problem) -> np.ndarray:
    """int64 `[samples]`, the part of each; longest first, or balanced by tokens where that finds no place.

    Raises:
        ValueError: neither keeps to `max_tokens`.
    """
    no_load = np.zeros(problem.num_parts, dtype=np.int64)
    part_of = place_longest_first(problem.work, problem.tokens, no_load, problem.limits)
    unplaced = np.flatnonzero(part_of == NONE)
    if unplaced.size == 0:
        return part_of
    # Keeping all parts within a number of tokens is to balance them by their tokens.
    by_tokens = np.argsort(-problem.tokens, kind="stable")
    fewest, most, max_tokens = problem.limits
    amounts = problem.tokens[by_tokens]
    limits = Limits(fewest, most, NO_CAP)
    part_of[by_tokens] = _refined(amounts, np.zeros_like(amounts), problem.num_parts, limits, 0.0)
    if np.bincount(part_of, problem.tokens).max() > max_tokens:
        sample = unplaced[0]
        raise ValueError(
            f"no placement under max_tokens={max_tokens} was found: sample {problem.order[sample]} with "
            f"{problem.tokens[sample]} tokens fits in none of {problem.num_parts} parts beside the others; "
            "raise max_tokens, or use more parts"
        )
    return part_of


@compiled
def _refined(
    work: np.ndarray, tokens: np.ndarray, num_parts: int, limits: Limits, tolerance: float
) -> np.ndarray:
    part_of = place_longest_first(work, tokens, np.zeros(num_parts, dtype=np.int64), limits)
    _refine(work, tokens, part_of, num_parts, limits, tolerance)
    return part_of


@compiled
def _refine(
    work: np.ndarray,
    tokens: np.ndarray,
    part_of: np.ndarray,
    num_parts: int,
    limits: Limits,
    tolerance: float,
) -> None:
    """Changes `part_of`."""
    parts = make_parts(work, tokens, part_of, np.zeros(num_parts, dtype=np.int64))
    improve(parts, limits, target_load(work, num_parts, limits, tolerance))
