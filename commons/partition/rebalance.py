"""Rebalancing: from where the samples are to a balanced partition, with as little movement as can be.

The heaviest part gives a sample to another one, mostly in return for a lighter sample: in the cheapest
exchange that brings it to the target load at once and keeps the other below; where there is none, in the one
that takes most off it for its price. What is stuck in the end is partitioned anew together with the lightest
parts. Last, samples that are away go home wherever the target allows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from commons.partition.compiled import compiled
from commons.partition.local_search import target_load
from commons.partition.move_to_target import labels_near_home, move_to_target
from commons.partition.parts import NONE, Limits, exchange, make_parts
from commons.partition.priced_exchanges import SIZE_BITS, Costs
from commons.partition.problem import NO_CAP, Problem, checked_tolerance
from commons.partition.refine import start_from_scratch
from commons.partition.workloads import as_integers, as_workloads, check_count


def rebalance(
    workloads: ArrayLike,
    home: ArrayLike,
    num_partitions: int,
    tolerance: float = 0.01,
    sizes: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    *,
    equal_size: bool = True,
    max_rows: int | None = None,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
) -> list[np.ndarray]:
    """Balances parts that have samples already, and leaves as many samples as it can where they are.

    Args:
        workloads: `[samples]`, non-negative.
        home: `[samples]`, the part that each sample is in.
        num_partitions: parts, at least 1.
        tolerance: the largest load may be (1 + tolerance) × the lower bound; where that is out of reach,
            about (1 + 1.1 · tolerance) × what `refined` attains.
        sizes: `[samples]`, non-negative: what it costs to move each, in bytes for example; None for 1 each.
        ranks_per_node: parts p with equal p // ranks_per_node are near each other: samples leave these last.
        equal_size, max_rows, tokens, max_tokens: as for `longest_processing_time`; `home` need not keep to
            them.

    Returns:
        As `longest_processing_time`. Never worse than `home`, if that keeps to the limits. Where it does not,
        samples leave until it does, the largest parts' first, with no regard to nodes.

    Raises:
        ValueError: as `longest_processing_time`; or `home` is not a part for each sample, `tolerance` or a
            size is negative, or `ranks_per_node` below 1.
    """
    tolerance = checked_tolerance(tolerance)
    problem = Problem.of(workloads, num_partitions, equal_size, max_rows, tokens, max_tokens)
    costs = _costs(problem, home, sizes, ranks_per_node)
    part_of = _within_limits(problem, costs)
    _rebalance(problem.work, problem.tokens, part_of, problem.limits, costs, tolerance)
    return problem.partition(part_of)


def _costs(problem: Problem, home: ArrayLike, sizes: ArrayLike | None, ranks_per_node: int | None) -> Costs:
    homes = np.asarray(home)
    num_samples, num_parts = len(problem.work), problem.num_parts
    if homes.shape != (num_samples,):
        raise ValueError(f"home has shape {homes.shape}, expected one part for each of {num_samples} samples")
    bad = NONE
    if homes.dtype.kind not in "iu":  # as an integer, NaN would be one of the parts
        fractions = np.flatnonzero(~(np.isfinite(homes) & (homes == np.floor(homes))))
        bad = int(fractions[0]) if fractions.size else NONE
    if bad == NONE:
        parts = np.ascontiguousarray(homes, dtype=np.int64)
        bad = _first_outside(parts, num_parts)
    if bad != NONE:
        raise ValueError(f"home[{bad}] is {homes[bad]}, expected a part from 0 to {num_parts - 1}")
    if ranks_per_node is not None:
        check_count("ranks_per_node", ranks_per_node)
        ranks_per_node = int(ranks_per_node)
    costs = np.ones(num_samples) if sizes is None else as_workloads(sizes, "sizes")
    if len(costs) != num_samples:
        raise ValueError(f"sizes has {len(costs)} values for {num_samples} workloads")
    node_of = np.arange(num_parts) // (ranks_per_node or num_parts)
    return Costs(parts[problem.order], problem.sorted(as_integers(costs, SIZE_BITS)), node_of)


def _within_limits(problem: Problem, costs: Costs) -> np.ndarray:
    """int64 `[samples]`: home, or what is near it and keeps to the limits."""
    part_of = costs.home.copy()
    if _keeps_limits(part_of, problem.tokens, problem.num_parts, problem.limits):
        return part_of
    fewest, most, max_tokens = problem.limits
    limits = Limits(fewest, most, NO_CAP)
    sizes = np.bincount(part_of, minlength=problem.num_parts)
    if sizes.min() < fewest or sizes.max() > most:
        _even_out(problem.work, part_of, problem.num_parts, limits)
    if np.bincount(part_of, problem.tokens).max(initial=0) <= max_tokens:
        return part_of
    # To keep all parts within a number of tokens is to rebalance their tokens.
    by_tokens = np.argsort(-problem.tokens, kind="stable")
    amounts, part_by_tokens = problem.tokens[by_tokens], part_of[by_tokens]
    costs_by_tokens = Costs(costs.home[by_tokens], costs.size[by_tokens], costs.node_of)
    _move(amounts, np.zeros_like(amounts), part_by_tokens, limits, costs_by_tokens, max_tokens, 0.0)
    part_of[by_tokens] = part_by_tokens
    if np.bincount(part_of, problem.tokens).max() <= max_tokens:
        return part_of
    part_of = start_from_scratch(problem)
    labels = labels_near_home(costs, np.arange(len(part_of)), part_of, np.arange(problem.num_parts))
    return labels[part_of]


@compiled
def _first_outside(homes: np.ndarray, num_parts: int) -> int:
    for sample in range(len(homes)):
        if not 0 <= homes[sample] < num_parts:
            return sample
    return NONE


@compiled
def _keeps_limits(part_of: np.ndarray, tokens: np.ndarray, num_parts: int, limits: Limits) -> bool:
    size = np.zeros(num_parts, dtype=np.int64)
    amount = np.zeros(num_parts, dtype=np.int64)
    for sample in range(len(part_of)):
        size[part_of[sample]] += 1
        amount[part_of[sample]] += tokens[sample]
    return size.min() >= limits.fewest and size.max() <= limits.most and amount.max() <= limits.max_tokens


@compiled
def _even_out(work: np.ndarray, part_of: np.ndarray, num_parts: int, limits: Limits) -> None:
    """Changes `part_of` until all sizes are within the limits, one move from the largest part at a time."""
    parts = make_parts(work, np.zeros_like(work), part_of, np.zeros(num_parts, dtype=np.int64))
    while parts.size.min() < limits.fewest or parts.size.max() > limits.most:
        giver = int(np.argmax(parts.size))
        taker = int(np.argmin(parts.size))
        if parts.size[taker] >= limits.fewest:
            for taker in parts.by_load:
                if parts.size[taker] < limits.most:
                    break
        wanted = (parts.load[giver] - parts.load[taker]) // 2
        start, end = parts.start[giver], parts.start[giver] + parts.size[giver]
        at = start
        while at + 1 < end and work[parts.members[at]] > wanted:
            at += 1
        exchange(parts, giver, parts.members[at], taker, NONE)


@compiled
def _rebalance(
    work: np.ndarray, tokens: np.ndarray, part_of: np.ndarray, limits: Limits, costs: Costs, tolerance: float
) -> None:
    """Changes `part_of`."""
    target = target_load(work, len(costs.node_of), limits, tolerance)
    _move(work, tokens, part_of, limits, costs, target, tolerance)


@compiled
def _move(
    work: np.ndarray,
    tokens: np.ndarray,
    part_of: np.ndarray,
    limits: Limits,
    costs: Costs,
    target: int,
    tolerance: float,
) -> None:
    """Changes `part_of`."""
    parts = make_parts(work, tokens, part_of, np.zeros(len(costs.node_of), dtype=np.int64))
    move_to_target(parts, limits, costs, target, tolerance)
