"""Rebalancing: balances parts that already have samples, and moves few samples, or few groups of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from .compiled import compiled
from .costs import LOOKS, LOOKS_FOR_GROUPS, Costs, no_copies, price_moves
from .from_scratch import place_longest_first
from .parts import NO_CAP, NONE, Task, even_out, sum_per_part
from .problem import Problem
from .refine import difference, place_from_scratch, refine_from_scratch
from .search import ALL_SWAPS, CHEAP_SWAPS, NO_SWAPS, search_to
from .token_search import level_tokens
from .workloads import MOVES_PER_COPY, as_integers, as_workloads, check_count, check_tolerance

if TYPE_CHECKING:
    from .groups import GroupSearch

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
        tolerance: as for `refine`; where that is out of reach, about (1 + 1.1 · tolerance) × what `refined`
            attains, but not more than equal-size `karmarkar_karp` attains under the same limits.
        sizes: `[samples]`, non-negative: the cost of moving each, in bytes for example; None for 1 each.
        ranks_per_node: parts p with equal p // ranks_per_node share a node; samples rarely leave it.
        groups: `[samples]`, integers: samples with the same one are brought together in one part where the
            tolerance and the limits allow it, all but negative ones. `ranks_per_node` matters less then.
        moves_per_copy: what it is worth to have a group in one part fewer: as much as moving its largest
            sample this many times. It is the bytes of embeddings that ranks exchange for an id ÷ the bytes of
            a sample per id. A group with more samples per part than this may stay in several.
        equal_size, tokens, max_tokens, speeds: as for `longest_processing_time`.
        token_tolerance: tokens of the fullest part may be (1 + token_tolerance) × the mean. Samples move for
            that where the largest load allows it, at most 4% of all. `tokens` may come without `max_tokens`.

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
    search = None
    if groups is not None:
        from .groups import GroupSearch  # only who has groups needs it

        search = GroupSearch.of(problem, costs, groups, moves_per_copy)
    if search is None:  # no two belong together
        part_of = _move(problem, costs, target, tolerance)
    else:
        costs, part_of = search.costs, _bring_together(search, target, tolerance)
    level_tokens(problem, costs, part_of, target)
    return problem.partition(part_of)


def _bring_together(search: GroupSearch, target: int, tolerance: float) -> np.ndarray:
    """int64 `[samples]`: as `_move`, with few groups in more than one part."""
    problem, costs = search.problem, search.costs
    costs.allow_looks(LOOKS_FOR_GROUPS)
    part_of = search.run(target)
    if search.reaches(part_of, target):
        return part_of
    costs.allow_looks(LOOKS)
    alone = _move(problem, costs._replace(copies=no_copies(len(costs.home))), target, tolerance)
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


def _move(problem: Problem, costs: Costs, target: int, tolerance: float) -> np.ndarray:
    """int64 `[samples]`: a partition near home that keeps to the limits, and to the target if that can be."""
    part_of = _keep_to_limits(problem, costs, target)
    _move_to(problem, part_of, costs, target, tolerance)
    return part_of


def _move_to(problem: Problem, part_of: np.ndarray, costs: Costs, target: int, tolerance: float) -> None:
    """Changes `part_of` until no part takes longer than the target; then sends home what may go.

    Where both targets fail, the partition from scratch is taken, or the one given if that is better: speeds
    or `max_tokens` can make it so.
    """
    given = part_of.copy()
    if search_to(problem.within(target), part_of, costs, CHEAP_SWAPS):
        return
    # The next target is (1 + tolerance) × the longest time of a search from scratch, and a tenth of the
    # tolerance more, because the last step would take more moves than all before; but not above differencing.
    scratch = refine_from_scratch(problem, 0.0)
    at_first = problem.time(given)
    longest = min(at_first, problem.time(part_of))
    attained = longest if scratch[-1] == NONE else problem.time(scratch)
    relaxed = int(min(attained * (1 + 1.1 * tolerance), 2.0**61))
    by_differencing = problem.time_within_limits(difference(problem, problem.num_parts))
    relaxed = max(target, min(relaxed, longest, by_differencing))
    for time in (target, relaxed) if attained <= target else (relaxed,):
        if search_to(problem.within(time), part_of, costs, ALL_SWAPS):
            return
    reached = problem.time(part_of)
    if scratch[-1] != NONE and attained <= min(at_first, reached):
        part_of[:] = _renumber(scratch, costs, problem.speeds)
    elif at_first < reached:
        part_of[:] = given
    search_to(problem.within(relaxed), part_of, costs, NO_SWAPS)


def _keep_to_limits(problem: Problem, costs: Costs, target: int) -> np.ndarray:
    """int64 `[samples]`: home, or a partition near it that keeps to the limits."""
    part_of = costs.home.copy()
    is_capped = problem.max_tokens < NO_CAP
    if not is_capped and np.bincount(part_of).max(initial=0) > FAR * problem.most:
        return _renumber(place_from_scratch(problem, tolerance=0.0), costs, problem.speeds)
    any_rows = problem.fewest == 0 and problem.most == len(part_of)
    task = problem.within(target)
    if any_rows and not is_capped:
        _relieve(task, part_of)
    if problem.fault(part_of) is None:
        return part_of
    even_out(task, part_of)
    if problem.fault(part_of) is None:
        return part_of
    # Keeping all parts within a number of tokens is rebalancing by tokens.
    tokens = problem.by_tokens()
    part_by_tokens = tokens.sort(part_of)
    if any_rows:
        _relieve(tokens.within(problem.max_tokens), part_by_tokens)
    by_tokens = price_moves(tokens.sort(costs.home), tokens.sort(costs.to_move), costs.node_of)
    _move_to(tokens, part_by_tokens, by_tokens, problem.max_tokens, 0.0)
    part_of = tokens.unsort(part_by_tokens)
    if problem.fault(part_of) is None:
        return part_of
    return _renumber(place_from_scratch(problem, tolerance=0.0), costs, problem.speeds)


def _relieve(task: Task, part_of: np.ndarray) -> None:
    """Changes `part_of`: of parts far above the target, all but the lightest samples are placed elsewhere."""
    work, num_parts = task.work, len(task.initial)
    load = task.initial + sum_per_part(work, part_of, num_parts)
    size = np.bincount(part_of, minlength=num_parts)
    leaves = np.zeros(len(work), dtype=np.bool_)
    # Samples that leave are no lighter than a part's mean, so that MANY need this much above the target.
    excess = (load - task.target) * size.astype(np.float64)
    for part in np.flatnonzero(excess > MANY * (load - task.initial).astype(np.float64)):
        members = np.flatnonzero(part_of == part)
        lighter = load[part] - np.cumsum(work[members])
        heaviest = members[lighter + work[members] > task.target]
        leaves[heaviest] = len(heaviest) > MANY
    leaving = np.flatnonzero(leaves)
    if leaving.size:
        load -= sum_per_part(work[leaving], part_of[leaving], num_parts)
        no_tokens, count = np.zeros_like(leaving), len(leaving)
        part_of[leaving] = place_longest_first(
            Task(work[leaving], no_tokens, load, task.target, 0, count, NO_CAP)
        )


def _renumber(part_of: np.ndarray, costs: Costs, speeds: np.ndarray) -> np.ndarray:
    """The same partition, its parts renumbered so that much stays at home; parts keep their speeds."""
    num_parts = len(speeds)
    at_home = sum_per_part(costs.to_move, part_of * num_parts + costs.home, num_parts * num_parts)
    matches = np.flatnonzero(at_home)
    number, is_taken = _match(matches[np.argsort(-at_home[matches], kind="stable")], speeds)
    left, free = np.flatnonzero(number == NONE), np.flatnonzero(~is_taken)
    left = left[np.argsort(speeds[left], kind="stable")]
    number[left] = free[np.argsort(speeds[free], kind="stable")]
    return number[part_of]


@compiled
def _match(matches: np.ndarray, speeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of each part, else NONE, and numbers taken, by matches part · parts + number, best first."""
    num_parts = len(speeds)
    number, is_taken = np.full(num_parts, NONE), np.zeros(num_parts, dtype=np.bool_)
    for match in matches:
        part, home = match // num_parts, match % num_parts
        if number[part] == NONE and not is_taken[home] and speeds[part] == speeds[home]:
            number[part] = home
            is_taken[home] = True
    return number, is_taken
