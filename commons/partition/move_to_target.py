"""From where samples are to parts of at most a target load, with moves that cost as little as can be."""

from __future__ import annotations

import numpy as np

from commons.partition.compiled import compiled
from commons.partition.local_search import improve, target_load
from commons.partition.longest_first import place_longest_first
from commons.partition.parts import NONE, Limits, Parts, exchange, fits, make_parts, refill
from commons.partition.priced_exchanges import Costs, moving_cost, next_exchange


@compiled
def move_to_target(parts: Parts, limits: Limits, costs: Costs, target: int, tolerance: float) -> None:
    """Exchanges samples until no part is above the target.

    Where that cannot be done, the target becomes (1 + tolerance) × what a search from scratch attains, and a
    tenth of the tolerance more, because the last step to it would take more moves than all before.
    """
    num_parts = len(parts.size)
    has_new_target = False
    while num_parts > 1 and parts.load[parts.by_load[num_parts - 1]] > target:
        heavy = parts.by_load[num_parts - 1]
        gives, partner, returns = next_exchange(parts, limits, costs, heavy, target)
        if partner != NONE:
            exchange(parts, heavy, gives, partner, returns)
        elif not has_new_target:
            has_new_target = True
            attainable = int(min(_attained(parts, limits) * (1 + 1.1 * tolerance), 2.0**61))
            target = max(target, min(attainable, parts.load[heavy]))
        elif not _replan_pool(parts, limits, costs, target):
            break
    _send_home(parts, limits, costs, target)


@compiled
def _attained(parts: Parts, limits: Limits) -> int:
    """The largest load that a search from scratch ends with; 0 where it finds no place for a sample."""
    part_of = place_longest_first(parts.work, parts.tokens, parts.base, limits)
    if part_of[-1] == NONE:
        return 0
    scratch = make_parts(parts.work, parts.tokens, part_of, parts.base)
    improve(scratch, limits, target_load(parts.work, len(parts.base), limits, 0.0))
    return scratch.load.max()


@compiled
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
                parts.part_of[samples] = labels_near_home(costs, samples, part_of, pool)[part_of]
                refill(parts)
                return True
        if len(pool) == num_parts:
            return False
        num_light *= 2


@compiled
def labels_near_home(costs: Costs, samples: np.ndarray, part_of: np.ndarray, pool: np.ndarray) -> np.ndarray:
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


@compiled
def _send_home(parts: Parts, limits: Limits, costs: Costs, target: int) -> None:
    """Sends samples that are away nearer to home, alone or in exchange, where the target allows.

    One that is on another node may go to any part of its own, any other one only home.
    """
    work, loads, node_of = parts.work, parts.load, costs.node_of
    homes, size = costs.home, costs.size
    for i in range(len(work)):
        part, home = parts.part_of[i], homes[i]
        if part == home:
            continue
        cheapest, goes_to, returns = 0, NONE, NONE
        first, end = home, home + 1
        if node_of[part] != node_of[home]:
            first = np.searchsorted(node_of, node_of[home])
            end = np.searchsorted(node_of, node_of[home], side="right")
        for to in range(first, end):
            saved = -moving_cost(i, part, to, homes, size, node_of)
            for at in range(parts.start[to], parts.start[to] + parts.size[to]):
                j = parts.members[at]
                difference = work[i] - work[j]
                if loads[to] + difference <= target and loads[part] - difference <= target:
                    cost = moving_cost(j, to, part, homes, size, node_of) - saved
                    if cost < cheapest and fits(parts, limits, part, i, to, j):
                        cheapest, goes_to, returns = cost, to, j
            may_go = parts.size[part] > limits.fewest and parts.size[to] < limits.most
            may_go = may_go and loads[to] + work[i] <= target
            if may_go and -saved < cheapest and fits(parts, limits, part, i, to, NONE):
                cheapest, goes_to, returns = -saved, to, NONE
        if goes_to != NONE:
            exchange(parts, part, i, goes_to, returns)
