"""Rebalancing: balances parts that already have samples, and moves few samples, or few groups of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .costs import LOOKS, LOOKS_FOR_GROUPS, Costs, price_moves
from .groups import MOVES_PER_COPY, GroupSearch
from .near_home import move
from .problem import Problem
from .token_search import level_tokens
from .workloads import as_integers, as_workloads, check_count, check_tolerance

# Bits of the sum of all sizes: this many bytes times ACROSS_NODES are still below 2**63.
SIZE_BITS = 50


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
    tolerance = check_tolerance(tolerance)
    problem = Problem.of(workloads, num_partitions, equal_size, tokens, max_tokens, speeds, token_tolerance)
    costs = _price(problem, home, sizes, ranks_per_node)
    target = problem.target(tolerance)
    search = None if groups is None else GroupSearch.of(problem, costs, groups, moves_per_copy)
    if search is None:  # no two belong together
        part_of = move(problem, costs, target, tolerance)
    else:
        costs, part_of = search.costs, _bring_together(search, target, tolerance)
    level_tokens(problem, costs, part_of, target)
    return problem.partition(part_of)


def _bring_together(search: GroupSearch, target: int, tolerance: float) -> np.ndarray:
    """int64 `[samples]`: as `move`, with few groups in more than one part."""
    problem, costs = search.problem, search.costs
    costs.allow_looks(LOOKS_FOR_GROUPS)
    part_of = search.run(target)
    if search.reaches(part_of, target):
        return part_of
    costs.allow_looks(LOOKS)
    alone = move(problem, costs.without_groups(), target, tolerance)
    attained = max(target, problem.time(alone))  # the target may be out of reach
    if attained > target:
        costs.allow_looks(LOOKS_FOR_GROUPS)
        part_of = search.run(attained)
    return part_of if search.reaches(part_of, attained) else search.finish(alone, attained)


def _price(problem: Problem, home: ArrayLike, sizes: ArrayLike | None, ranks_per_node: int | None) -> Costs:
    """Checks the arguments; returns the costs of moves, in the order of the problem."""
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
    to_move = np.ones(num_samples) if sizes is None else as_workloads(sizes, "sizes")
    if len(to_move) != num_samples:
        raise ValueError(f"sizes has {len(to_move)} values for {num_samples} workloads")
    node_of = np.arange(num_parts) // (ranks_per_node or num_parts)
    return price_moves(problem.sort(homes), problem.sort(as_integers(to_move, SIZE_BITS)), node_of)
