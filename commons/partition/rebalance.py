"""Rebalancing: balances parts that already have samples, and moves few samples, or few groups of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from commons.partition.from_scratch import place_longest_first
from commons.partition.grouped_search import Groups, even_out_groups, join_groups, level_groups, level_pools
from commons.partition.problem import Problem, checked_tolerance
from commons.partition.refine import place_from_scratch
from commons.partition.search import (
    NO_CAP,
    Limits,
    base_of,
    make_parts,
    sum_per_part,
    target_time,
    time_of,
)
from commons.partition.search_from_home import Costs, even_out, move, nearest_home
from commons.partition.workloads import as_integers, as_workloads, check_count

# Bits of the sum of all sizes: this many bytes times ACROSS_NODES are still below 2**63.
SIZE_BITS = 50
# Where a part has this many times the samples that it may have, or has to give so many away, making one move
# at a time would take too long.
FAR, MANY = 4, 256
# A group in one more part costs as much as moving this many of its samples: its embeddings travel once more,
# which are larger than ids.
COPY_PER_MOVE = 16
# Each pass joins less than the one before.
JOINING_PASSES = 3


def rebalance(
    workloads: ArrayLike,
    home: ArrayLike,
    num_partitions: int,
    tolerance: float = 0.01,
    sizes: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    *,
    groups: ArrayLike | None = None,
    equal_size: bool = True,
    max_rows: int | None = None,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
    speeds: ArrayLike | None = None,
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
        equal_size, max_rows, tokens, max_tokens, speeds: as for `longest_processing_time`; `home` need not
            keep to the limits.

    Returns:
        As `longest_processing_time`. Without groups, never worse than `home` if that keeps to the limits.
        With groups, never worse than without. Where `home` does not keep to the limits, samples leave until
        it does, the largest parts' first, with no regard to nodes.

    Raises:
        ValueError: as `longest_processing_time`; or `home` is not a part, or `groups` not an integer, for
            each sample; `tolerance` or a size is negative; or `ranks_per_node` is below 1.
    """
    tolerance = checked_tolerance(tolerance)
    problem = Problem.of(workloads, num_partitions, equal_size, max_rows, tokens, max_tokens, speeds)
    costs = _costs(problem, home, sizes, ranks_per_node)
    target = target_time(problem.work, problem.speeds, problem.limits, tolerance)
    alone = _moved(problem, costs, target, tolerance)
    group_of = None if groups is None else problem.sorted(numbered_groups(groups, len(problem.work)))
    if group_of is None or group_of.max(initial=-1) == len(group_of) - 1:  # no two belong together
        return problem.partition(alone)
    attained = _time_of(problem, alone)
    together = _together(problem, costs, group_of, target, tolerance)
    if _time_of(problem, together) > max(target, attained):
        together = _together(problem, costs, group_of, attained, tolerance)
    load = _time_of(problem, together)
    if load <= target < attained:
        return problem.partition(together)
    is_cheaper = _cost(costs, group_of, together) < _cost(costs, group_of, alone)
    return problem.partition(together if is_cheaper and load <= max(target, attained) else alone)


def numbered_groups(groups: ArrayLike, num_samples: int) -> np.ndarray:
    """Numbers the groups from 0 in the order of their first samples, int64 `[samples]`.

    A sample with a negative label gets a number of its own. Were groups numbered by label, labels such as
    random ids would break ties.

    Raises:
        ValueError: `groups` is not one integer per sample.
    """
    labels = np.asarray(groups)
    if labels.shape != (num_samples,) or (labels.dtype.kind not in "iu" and num_samples):
        raise ValueError(
            f"groups has shape {labels.shape} and dtype {labels.dtype}, expected one integer for each of "
            f"{num_samples} samples"
        )
    found, number = np.unique(labels, return_inverse=True)
    number = np.where(labels < 0, len(found) + np.arange(num_samples), number)
    _, first, number = np.unique(number, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def _moved(problem: Problem, costs: Costs, target: int, tolerance: float) -> np.ndarray:
    """int64 `[samples]`: a partition near home that keeps to the limits, and to the target if that can be."""
    part_of = _within_limits(problem, costs, target)
    move(problem.work, problem.tokens, part_of, problem.speeds, problem.limits, costs, target, tolerance)
    return part_of


def _together(
    problem: Problem, costs: Costs, group_of: np.ndarray, target: int, tolerance: float
) -> np.ndarray:
    """int64 `[samples]`: as `_moved`, with few groups in more than one part."""
    by_group = np.argsort(group_of, kind="stable")
    groups = _groups_of(group_of[by_group], costs.of_move[by_group], costs.home[by_group])
    work, tokens, limits, speeds = (
        problem.work[by_group],
        problem.tokens[by_group],
        problem.limits,
        problem.speeds,
    )
    part_of = _homes_of_groups(costs, group_of)[by_group]
    parts = make_parts(work, tokens, part_of, base_of(speeds, target))
    even_out_groups(parts, limits, groups)
    level_groups(parts, limits, groups, target)
    level_pools(work, tokens, part_of, speeds, limits, target)
    near_home = np.empty_like(part_of)
    near_home[by_group] = part_of
    if problem.beyond_limits(near_home) is not None or _time_of(problem, near_home) > target:
        try:
            near_home = _moved(problem, costs._replace(home=near_home), target, tolerance)
        except ValueError:  # from there, no placement under max_tokens was found
            near_home = _moved(problem, costs, target, tolerance)
    attained = max(target, _time_of(problem, near_home))
    parts = make_parts(work, tokens, near_home[by_group], base_of(speeds, attained))
    for _ in range(JOINING_PASSES):
        join_groups(parts, limits, groups, attained)
    near_home[by_group] = parts.part_of
    return near_home


def _cost(costs: Costs, group_of: np.ndarray, part_of: np.ndarray) -> int:
    """The cost of copies and moves of samples that are in these parts."""
    largest = _largest_moves(group_of, costs.of_move)
    groups_in_parts = np.unique(group_of * len(costs.node_of) + part_of) // len(costs.node_of)
    copies = COPY_PER_MOVE * int(largest[groups_in_parts].sum())
    return copies + int(costs.of_move[part_of != costs.home].sum())


def _largest_moves(group_of: np.ndarray, of_move: np.ndarray) -> np.ndarray:
    """int64 `[groups]`: the cost of moving the largest sample of each group."""
    largest = np.zeros(int(group_of.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(largest, group_of, of_move)
    return largest


def _groups_of(group_of: np.ndarray, of_move: np.ndarray, home: np.ndarray) -> Groups:
    """The groups of samples that are sorted by group."""
    largest = _largest_moves(group_of, of_move)
    start = np.searchsorted(group_of, np.arange(len(largest) + 1))
    return Groups(group_of, start, COPY_PER_MOVE * largest, of_move, home)


def _homes_of_groups(costs: Costs, group_of: np.ndarray) -> np.ndarray:
    """int64 `[samples]`: the part that has most of each sample's group, by the cost of moving."""
    num_parts = len(costs.node_of)
    pairs, pair_of = np.unique(group_of * num_parts + costs.home, return_inverse=True)
    group, part = np.divmod(pairs, num_parts)
    at_home = sum_per_part(costs.of_move, pair_of, len(pairs))
    best_last = np.lexsort((-part, at_home, group))
    home_of_group = np.empty(int(group_of.max(initial=-1)) + 1, dtype=np.int64)
    home_of_group[group[best_last]] = part[best_last]  # the last one stays
    return home_of_group[group_of]


def _time_of(problem: Problem, part_of: np.ndarray) -> int:
    return int(time_of(problem.work, part_of, problem.speeds))


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
    return Costs(problem.sorted(homes), problem.sorted(as_integers(costs, SIZE_BITS)), node_of)


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
    costs_by_tokens = Costs(costs.home[by_tokens], costs.of_move[by_tokens], costs.node_of)
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
    for part in np.flatnonzero((load - target) * size.astype(np.float64) > MANY * (load - base)):
        members = np.flatnonzero(part_of == part)
        lighter = load[part] - np.cumsum(work[members])
        of_part = members[lighter + work[members] > target]
        leaves[of_part] = len(of_part) > MANY
    leaving = np.flatnonzero(leaves)
    if leaving.size:
        load -= sum_per_part(work[leaving], part_of[leaving], len(base))
        no_tokens, no_caps = np.zeros_like(leaving), Limits(0, len(leaving), NO_CAP)
        part_of[leaving] = place_longest_first(work[leaving], no_tokens, load, no_caps)
