"""Rebalancing: balances parts that already have samples, and moves few samples, or few groups of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .from_scratch import place_longest_first
from .groups import MOVES_PER_COPY, Grouped, together
from .problem import Problem, checked_tolerance
from .refine import place_from_scratch
from .search import NO_CAP, Limits, base_of, sum_per_part, target_time
from .search_from_home import (
    LOOKS,
    LOOKS_FOR_GROUPS,
    Costs,
    allow_more_looks,
    costs_of_moves,
    even_out,
    move,
    nearest_home,
)
from .token_search import level_tokens
from .workloads import as_integers, as_workloads, check_count

# Bits of the sum of all sizes: this many bytes times ACROSS_NODES are still below 2**63.
SIZE_BITS = 50
# Where a part has this many times the samples that it may have, or has to give so many away, making one move
# at a time would take too long.
FAR, MANY = 4, 256


def rebalance(
    workloads: ArrayLike,
    home: ArrayLike,
    num_partitions: int,
    tolerance: float = 0.01,
    sizes: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    *,
    groups: ArrayLike | None = None,
    moves_per_copy: float = MOVES_PER_COPY,
    equal_size: bool = True,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
    speeds: ArrayLike | None = None,
    token_tolerance: float | None = None,
) -> list[np.ndarray]:
    """Balances parts that already have samples, and moves as few of them as it can.

    Args:
        workloads: `[samples]`, non-negative.
        home: `[samples]`, the part that each sample is in.
        num_partitions: parts, at least 1.
        tolerance: the largest load ÷ speed may be (1 + tolerance) × the lower bound; where that is out of
            reach, about (1 + 1.1 · tolerance) × what `refined` attains, but not more than equal-size
            `karmarkar_karp` attains under the same limits.
        sizes: `[samples]`, non-negative: the cost of moving each, in bytes for example; None for 1 each.
        ranks_per_node: parts p with equal p // ranks_per_node share a node; samples rarely leave it.
        groups: `[samples]`, integers: samples with the same one belong together, in one part. They are
            brought together where the tolerance and the limits allow it. A sample with a negative one belongs
            to no group. `ranks_per_node` matters less then. None if every sample may move alone.
        moves_per_copy: what it is worth to have a group in one part fewer: as much as moving its largest
            sample this many times. It is the bytes of embeddings that ranks exchange for an id ÷ the bytes of
            a sample per id. A group with more samples per part than this may stay in several.
        equal_size, tokens, max_tokens, speeds: as for `longest_processing_time`; `home` need not
            keep to the limits.
        token_tolerance: tokens of the fullest part may be (1 + token_tolerance) × the mean. Samples move for
            that where the largest load allows it, at most 4% of all. `tokens` may then come without
            `max_tokens`. None to leave tokens alone.

    Returns:
        As `longest_processing_time`. Without groups, never worse than `home` if that keeps to the limits.
        With groups, never worse than without. Where `home` does not keep to the limits, samples leave until
        it does, the largest parts' first, with no regard to nodes.

    Raises:
        ValueError: as `longest_processing_time`; or `home` is not a part, or `groups` not an integer, for
            each sample; a tolerance or a size is negative; `ranks_per_node` is below 1; or `moves_per_copy`
            is not from 0 to 1000.
    """
    tolerance = checked_tolerance(tolerance)
    problem = Problem.of(workloads, num_partitions, equal_size, tokens, max_tokens, speeds, token_tolerance)
    costs = _costs(problem, home, sizes, ranks_per_node)
    target = target_time(problem.work, problem.speeds, problem.limits, tolerance)
    samples = None if groups is None else Grouped.of(problem, costs, groups, moves_per_copy)
    if samples is None:  # no two belong together
        part_of = _moved(problem, costs, target, tolerance)
        level_tokens(problem, costs, part_of, target)
        return problem.partition(part_of)
    part_of = _together(samples, target, tolerance)
    samples.level_tokens(part_of, target)
    return problem.partition(part_of)


def _together(samples: Grouped, target: int, tolerance: float) -> np.ndarray:
    """int64 `[samples]`: as `_moved`, with few groups in more than one part."""
    problem, costs = samples.problem, samples.costs
    allow_more_looks(costs, LOOKS_FOR_GROUPS)
    part_of = together(samples, target)
    if samples.reaches(part_of, target):
        return part_of
    allow_more_looks(costs, LOOKS)
    alone = _moved(problem, costs, target, tolerance)
    attained = max(target, samples.time(alone))  # the target may be out of reach
    if attained > target:
        allow_more_looks(costs, LOOKS_FOR_GROUPS)
        part_of = together(samples, attained)
    return part_of if samples.reaches(part_of, attained) else samples.finish(alone, attained)


def _moved(problem: Problem, costs: Costs, target: int, tolerance: float) -> np.ndarray:
    """int64 `[samples]`: a partition near home that keeps to the limits, and to the target if that can be."""
    part_of = _within_limits(problem, costs, target)
    move(problem.work, problem.tokens, part_of, problem.speeds, problem.limits, costs, target, tolerance)
    return part_of


def _costs(problem: Problem, home: ArrayLike, sizes: ArrayLike | None, ranks_per_node: int | None) -> Costs:
    homes = np.asarray(home)
    num_samples, num_parts = len(problem.work), problem.num_parts
    if homes.shape != (num_samples,):
        raise ValueError(f"home has shape {homes.shape}, expected one part for each of {num_samples} samples")
    is_part = (homes >= 0) & (homes < num_parts) & (homes == np.floor(homes))  # NaN compares as False
    if not is_part.all():
        bad = int(np.argmin(is_part))
        raise ValueError(f"home[{bad}] is {homes[bad]}, expected a part from 0 to {num_parts - 1}")
    if ranks_per_node is not None:
        check_count("ranks_per_node", ranks_per_node)
        ranks_per_node = int(ranks_per_node)
    costs = np.ones(num_samples) if sizes is None else as_workloads(sizes, "sizes")
    if len(costs) != num_samples:
        raise ValueError(f"sizes has {len(costs)} values for {num_samples} workloads")
    node_of = np.arange(num_parts) // (ranks_per_node or num_parts)
    return costs_of_moves(problem.sorted(homes), problem.sorted(as_integers(costs, SIZE_BITS)), node_of)


def _within_limits(problem: Problem, costs: Costs, target: int) -> np.ndarray:
    """int64 `[samples]`: home, or a partition near it that keeps to the limits."""
    part_of = costs.home.copy()
    fewest, most, max_tokens = problem.limits
    if max_tokens == NO_CAP and np.bincount(part_of).max(initial=0) > FAR * most:
        return nearest_home(place_from_scratch(problem, tolerance=0.0), costs, problem.speeds)
    base = base_of(problem.speeds, target)
    any_rows = fewest == 0 and most == len(part_of)
    if any_rows and max_tokens == NO_CAP:
        _relieve(problem.work, part_of, base, target)
    if problem.beyond_limits(part_of) is None:
        return part_of
    even_out(problem.work, part_of, base, problem.limits)
    if problem.beyond_limits(part_of) is None:
        return part_of
    # Keeping all parts within a number of tokens is rebalancing by tokens.
    by_tokens = np.argsort(-problem.tokens, kind="stable")
    amounts, part_by_tokens = problem.tokens[by_tokens], part_of[by_tokens]
    costs_by_tokens = costs_of_moves(costs.home[by_tokens], costs.of_move[by_tokens], costs.node_of)
    no_cap = Limits(fewest, most, NO_CAP)
    equal = np.ones(problem.num_parts)
    if any_rows:
        _relieve(amounts, part_by_tokens, np.zeros_like(base), max_tokens)
    move(amounts, np.zeros_like(amounts), part_by_tokens, equal, no_cap, costs_by_tokens, max_tokens, 0.0)
    part_of[by_tokens] = part_by_tokens
    if problem.beyond_limits(part_of) is None:
        return part_of
    return nearest_home(place_from_scratch(problem, tolerance=0.0), costs, problem.speeds)


def _relieve(work: np.ndarray, part_of: np.ndarray, base: np.ndarray, target: int) -> None:
    """Changes `part_of`: parts that have to give many samples away keep their lightest, up to the target.

    The others are placed longest first, which leaves no part with more than the largest had. Arguments are as
    `move` and `make_parts` take them.
    """
    load = base + sum_per_part(work, part_of, len(base))
    size = np.bincount(part_of, minlength=len(base))
    leaves = np.zeros(len(work), dtype=np.bool_)
    # Samples that leave are no lighter than a part's mean, so that MANY need this much above the target.
    for part in np.flatnonzero(
        (load - target) * size.astype(np.float64) > MANY * (load - base).astype(np.float64)
    ):
        members = np.flatnonzero(part_of == part)
        lighter = load[part] - np.cumsum(work[members])
        of_part = members[lighter + work[members] > target]
        leaves[of_part] = len(of_part) > MANY
    leaving = np.flatnonzero(leaves)
    if leaving.size:
        load -= sum_per_part(work[leaving], part_of[leaving], len(base))
        no_tokens, no_caps = np.zeros_like(leaving), Limits(0, len(leaving), NO_CAP)
        part_of[leaving] = place_longest_first(work[leaving], no_tokens, load, no_caps)
