"""Rebalancing: from where the samples are to a balanced partition, with as little movement as can be.

The heaviest part gives a sample to another one, mostly in return for a lighter sample: in the cheapest
exchange that brings it to the target load at once and keeps the other below; where there is none, in the one
that takes most off it for its price. What is stuck in the end is partitioned anew together with the lightest
parts. Last, samples that are away go home wherever the target allows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import ArrayLike

from commons.partition.local_search import RESOLUTION, improve, target_load
from commons.partition.longest_first import place_longest_first
from commons.partition.parts import NONE, Limits, Parts, exchange, first_at_most, fits, make_parts, refill
from commons.partition.problem import NO_CAP, Problem, checked_tolerance
from commons.partition.refine import start_from_scratch
from commons.partition.workloads import as_integers, as_workloads

# A byte to another node counts as many bytes within one: across nodes last.
ACROSS_NODES = 1000
SIZE_BITS = 50  # of all sizes together; ten more are for the way across nodes
# For each sample of a part that is too heavy, so many exchanges that are possible are compared;
TRIES = 32
# of the lightest parts so many, if they can take an eighth of what is needed at once.
PARTNERS = 8
WORTHWHILE = 8
ANYWHERE = NONE


class Costs(NamedTuple):
    """What it costs to have a sample away from home; all int64.

    Attributes:
        home: `[samples]`, the part that each is in at first.
        size: `[samples]`, of each, when it moves.
        node_of: `[parts]`.
    """

    home: np.ndarray
    size: np.ndarray
    node_of: np.ndarray


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
        As `longest_processing_time`. Never worse than `home`, if that keeps to the limits.

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
    bad = np.flatnonzero((homes < 0) | (homes >= num_parts) | (homes != np.floor(homes)))
    if bad.size:
        raise ValueError(f"home[{bad[0]}] is {homes[bad[0]]}, expected a part from 0 to {num_parts - 1}")
    if ranks_per_node is not None and ranks_per_node < 1:
        raise ValueError(f"ranks_per_node is {ranks_per_node}, expected at least 1")
    costs = np.ones(num_samples) if sizes is None else as_workloads(sizes, "sizes")
    if len(costs) != num_samples:
        raise ValueError(f"sizes has {len(costs)} values for {num_samples} workloads")
    node_of = np.arange(num_parts) // (ranks_per_node or num_parts)
    return Costs(problem.sorted(homes), problem.sorted(as_integers(costs, SIZE_BITS)), node_of)


def _within_limits(problem: Problem, costs: Costs) -> np.ndarray:
    """int64 `[samples]`: home, or what is near it and keeps to the limits."""
    part_of = costs.home.copy()
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
    return start_from_scratch(problem)


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def _rebalance(
    work: np.ndarray, tokens: np.ndarray, part_of: np.ndarray, limits: Limits, costs: Costs, tolerance: float
) -> None:
    """Changes `part_of`."""
    target = target_load(work, len(costs.node_of), limits, tolerance)
    _move(work, tokens, part_of, limits, costs, target, tolerance)


@njit(cache=True, nogil=True)
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
    _move_to_target(parts, limits, costs, target, tolerance)


@njit(cache=True, nogil=True)
def _move_to_target(parts: Parts, limits: Limits, costs: Costs, target: int, tolerance: float) -> None:
    """Exchanges samples until no part is above the target.

    Where that cannot be done, the target becomes (1 + tolerance) × what a search from scratch attains, and a
    tenth of the tolerance more, because the last step to it would take more moves than all before.
    """
    num_parts = len(parts.size)
    is_attainable = False
    while num_parts > 1 and parts.load[parts.by_load[num_parts - 1]] > target:
        heavy = parts.by_load[num_parts - 1]
        gives, partner, returns = _next_exchange(parts, limits, costs, heavy, target)
        if partner != NONE:
            exchange(parts, heavy, gives, partner, returns)
        elif not is_attainable:
            is_attainable = True
            target = max(target, int(_attained(parts, limits) * (1 + 1.1 * tolerance)))
        elif not _replan_pool(parts, limits, costs, target):
            break
    _send_home(parts, limits, costs, target)


@njit(cache=True, nogil=True)
def _next_exchange(
    parts: Parts, limits: Limits, costs: Costs, heavy: int, target: int
) -> tuple[int, int, int]:
    """(sample given, partner, sample returned); the partner is NONE if no exchange helps.

    First what brings the heavy part to the target at once, then what takes most off; across nodes last.
    """
    needed = parts.load[heavy] - target
    least = max(int(RESOLUTION * target), 1)
    several_nodes = costs.node_of[0] != costs.node_of[-1]
    gives, partner, returns = NONE, NONE, NONE
    for search in range(6):
        node = costs.node_of[heavy] if search % 2 == 0 else ANYWHERE
        if partner != NONE or (node != ANYWHERE and not several_nodes):
            continue
        if search < 2:
            gives, partner, returns = _best_exchange(parts, limits, costs, heavy, target, needed, node)
        elif search < 4:
            gives, partner, returns = _best_relief(parts, limits, costs, heavy, target, least, node)
        else:
            gives, partner, returns = _best_exchange(parts, limits, costs, heavy, target, least, node)
    return gives, partner, returns


@njit(inline="always")
def _away(home: int, part: int, size: int, node_of: np.ndarray) -> int:
    """What it costs to have a sample of that home and size in a part."""
    if part == home:
        return 0
    return size * (1 if node_of[part] == node_of[home] else ACROSS_NODES)


@njit(inline="always")
def _change(sample: int, of: int, to: int, home: np.ndarray, size: np.ndarray, node_of: np.ndarray) -> int:
    """What it costs to move the sample from one part to another; negative on the way home, 0 for NONE."""
    if sample == NONE:
        return 0
    return _away(home[sample], to, size[sample], node_of) - _away(home[sample], of, size[sample], node_of)


@njit(cache=True, nogil=True)
def _best_exchange(
    parts: Parts, limits: Limits, costs: Costs, heavy: int, target: int, least: int, node: int
) -> tuple[int, int, int]:
    """The exchange that takes most off the heavy part for what it costs.

    It takes at least `least` and leaves the partner, one of that node or ANYWHERE, within the target. What it
    takes beyond what the heavy part has too much counts for nothing.
    """
    work, part_of, loads = parts.work, parts.part_of, parts.load
    home, size, node_of = costs.home, costs.size, costs.node_of
    needed = loads[heavy] - target
    headroom = target - loads[parts.by_load[0]]
    gives, partner, returns, best = NONE, NONE, NONE, 0.0
    if least > headroom:
        return gives, partner, returns
    open_part = _lightest_open(parts, limits, costs, heavy, node)
    for at in range(parts.size[heavy]):
        # To find what is cheap and enough, the lightest sample first; to find what takes most, the heaviest.
        i = parts.members[parts.start[heavy] + (at if least < needed else parts.size[heavy] - 1 - at)]
        price = size[i] if home[i] == heavy else 1  # at least, unless what it gets in return goes home
        if work[i] < least:
            continue
        # From the lightest sample that some part could give in return, because it is the cheapest.
        j = first_at_most(work, i + 1, work[i] - headroom - 1) - 1
        tries = 0
        while j > i and tries < TRIES:
            taker, difference = part_of[j], work[i] - work[j]
            if difference < least or min(difference, needed) <= best * price:
                break
            is_there = node == ANYWHERE or node_of[taker] == node
            if is_there and taker != heavy and loads[taker] + difference <= target:
                tries += 1
                cost = _change(i, heavy, taker, home, size, node_of)
                cost += _change(j, taker, heavy, home, size, node_of)
                value = min(difference, needed) / max(cost, 1)
                if value > best and fits(parts, limits, heavy, i, taker, j):
                    gives, partner, returns, best = i, taker, j, value
            j -= 1
        if open_part == NONE or loads[open_part] + work[i] > target:
            continue
        for taker in (home[i], open_part):
            is_there = node == ANYWHERE or node_of[taker] == node
            is_open = taker != heavy and parts.size[taker] < limits.most
            if is_there and is_open and loads[taker] + work[i] <= target:
                cost = _change(i, heavy, taker, home, size, node_of)
                value = min(work[i], needed) / max(cost, 1)
                if value > best and fits(parts, limits, heavy, i, taker, NONE):
                    gives, partner, returns, best = i, taker, NONE, value
    return gives, partner, returns


@njit(cache=True, nogil=True)
def _lightest_open(parts: Parts, limits: Limits, costs: Costs, giver: int, node: int) -> int:
    """The lightest part that the giver may give a sample for nothing, as far as sizes go; NONE if none is."""
    if parts.size[giver] == limits.fewest:
        return NONE
    for taker in parts.by_load:
        is_there = node == ANYWHERE or costs.node_of[taker] == node
        if taker != giver and is_there and parts.size[taker] < limits.most:
            return taker
    return NONE


@njit(cache=True, nogil=True)
def _best_relief(
    parts: Parts, limits: Limits, costs: Costs, heavy: int, target: int, least: int, node: int
) -> tuple[int, int, int]:
    """The exchange that takes most off what all parts have above the target, for what it costs.

    The partner, one of the lightest, may end above the target, but what it then has too much counts against:
    of two giants in one part, one leaves although no part has room for it.
    """
    work, loads, members = parts.work, parts.load, parts.members
    home, size, node_of = costs.home, costs.size, costs.node_of
    needed = loads[heavy] - target
    first, end = parts.start[heavy], parts.start[heavy] + parts.size[heavy]
    gives, partner, returns, best = NONE, NONE, NONE, 0.0
    partners = 0
    for taker in parts.by_load:
        headroom = target - loads[taker]
        if headroom < least or partners == PARTNERS:
            break
        if taker == heavy or (node != ANYWHERE and node_of[taker] != node):
            continue
        may_give = parts.size[heavy] > limits.fewest and parts.size[taker] < limits.most
        j, end_j = parts.start[taker], parts.start[taker] + parts.size[taker]
        if not (may_give or _is_worthwhile(parts, heavy, taker, needed, least)):
            continue
        partners += 1
        for at in range(first, end):
            i = members[at]
            # The lightest sample of the partner in return for which no more than needed is taken off.
            while j < end_j and work[i] - work[members[j]] <= needed:
                j += 1
            for option in range(2 if may_give else 1):
                returned = NONE
                if option == 0:
                    if j == parts.start[taker]:
                        continue
                    returned = members[j - 1]
                difference = work[i] - (work[returned] if returned != NONE else 0)
                relief = min(difference, needed) - max(difference - headroom, 0)
                if relief < least:
                    continue
                cost = _change(i, heavy, taker, home, size, node_of)
                cost += _change(returned, taker, heavy, home, size, node_of)
                value = relief / max(cost, 1)
                if value > best and fits(parts, limits, heavy, i, taker, returned):
                    gives, partner, returns, best = i, taker, returned, value
    return gives, partner, returns


@njit(cache=True, nogil=True)
def _is_worthwhile(parts: Parts, heavy: int, taker: int, needed: int, least: int) -> bool:
    """Whether an exchange for the lightest sample of `taker` takes a good share of what is needed."""
    work, members = parts.work, parts.members
    if parts.size[taker] == 0:
        return False
    heaviest, lightest = members[parts.start[taker]], members[parts.start[taker] + parts.size[taker] - 1]
    at, last = parts.start[heavy], parts.start[heavy] + parts.size[heavy] - 1
    while at < last and work[members[at]] - work[heaviest] > needed:
        at += 1
    return work[members[at]] - work[lightest] >= max(least, needed // WORTHWHILE)


@njit(cache=True, nogil=True)
def _attained(parts: Parts, limits: Limits) -> int:
    """The largest load that a search from scratch ends with; 0 where it finds no place for a sample."""
    part_of = place_longest_first(parts.work, parts.tokens, parts.base, limits)
    if part_of[-1] == NONE:
        return 0
    scratch = make_parts(parts.work, parts.tokens, part_of, parts.base)
    improve(scratch, limits, target_load(parts.work, len(parts.base), limits, 0.0))
    return scratch.load.max()


@njit(cache=True, nogil=True)
def _replan_pool(parts: Parts, limits: Limits, costs: Costs, target: int) -> bool:
    """Partitions the samples of the heaviest part and of the lightest ones anew; whether that helped.

    The pool grows until it gets below the target or, at last, with all parts in it, lighter than it was.
    """
    num_parts = len(parts.size)
    heavy = parts.by_load[num_parts - 1]
    num_light = 1
    while True:
        num_light = min(num_light, num_parts - 1)
        pool = np.append(parts.by_load[:num_light], heavy)
        in_pool = np.zeros(num_parts, dtype=np.bool_)
        in_pool[pool] = True
        samples = np.flatnonzero(in_pool[parts.part_of])
        work, tokens = parts.work[samples], parts.tokens[samples]
        part_of = place_longest_first(work, tokens, parts.base[pool], limits)
        if part_of[-1] != NONE:
            planned = make_parts(work, tokens, part_of, parts.base[pool])
            improve(planned, limits, target)
            enough = target if len(pool) < num_parts else parts.load[heavy] - 1
            if planned.load.max() <= enough:
                parts.part_of[samples] = _labels_near_home(costs, samples, part_of, pool)[part_of]
                refill(parts)
                return True
        if len(pool) == num_parts:
            return False
        num_light *= 2


@njit(cache=True, nogil=True)
def _labels_near_home(costs: Costs, samples: np.ndarray, part_of: np.ndarray, pool: np.ndarray) -> np.ndarray:
    """For each planned part one of the pool's, so that much stays at home: the largest matches first."""
    size = len(pool)
    at_home = np.zeros(size * size, dtype=np.int64)
    index_of = np.full(len(costs.node_of), NONE, dtype=np.int64)
    index_of[pool] = np.arange(size)
    for sample in range(len(samples)):
        home = index_of[costs.home[samples[sample]]]
        if home != NONE:
            at_home[part_of[sample] * size + home] += costs.size[samples[sample]]
    matches = np.flatnonzero(at_home)
    labels = np.full(size, NONE, dtype=np.int64)
    is_free = np.ones(size, dtype=np.bool_)
    for match in matches[np.argsort(-at_home[matches], kind="mergesort")]:
        part, home = match // size, match % size
        if labels[part] == NONE and is_free[home]:
            labels[part] = pool[home]
            is_free[home] = False
    labels[labels == NONE] = pool[is_free]
    return labels


@njit(cache=True, nogil=True)
def _send_home(parts: Parts, limits: Limits, costs: Costs, target: int) -> None:
    """Sends samples that are away home, alone or in exchange, where both parts stay within the target."""
    work, loads = parts.work, parts.load
    homes, size, node_of = costs.home, costs.size, costs.node_of
    for i in range(len(work)):
        part, home = parts.part_of[i], homes[i]
        if part == home:
            continue
        cheapest, returns = _away(home, part, size[i], node_of), NONE
        for at in range(parts.start[home], parts.start[home] + parts.size[home]):
            j = parts.members[at]
            difference = work[i] - work[j]
            if loads[home] + difference <= target and loads[part] - difference <= target:
                cost = _change(j, home, part, homes, size, node_of)
                if cost < cheapest and fits(parts, limits, part, i, home, j):
                    cheapest, returns = cost, j
        may_go = parts.size[part] > limits.fewest and parts.size[home] < limits.most
        goes_alone = may_go and cheapest >= 0 and loads[home] + work[i] <= target
        if goes_alone and fits(parts, limits, part, i, home, NONE):
            exchange(parts, part, i, home, NONE)
        elif returns != NONE:
            exchange(parts, part, i, home, returns)
