"""Searches by swaps that lighten the heaviest part: for balance alone, and from home, with a price on moves.

From home, the heaviest part swaps with a light one, at the lowest price for what the swap takes off it. Where
no such swap is left, the search for balance alone makes the next one. Last, samples that are away go home
wherever the target allows.
"""

from __future__ import annotations

import math

import numpy as np

from .compiled import compiled, inner
from .costs import LOOKS, Costs, copying_cost, count_copies, moving_cost, returning_cost, swap_and_count
from .parts import NONE, RESOLUTION, Parts, Task, find_below, fits, make_parts, swap

# For balance alone, a swap is accepted once it brings the heaviest part near the middle between it and the
# lightest: within 1/8 of their distance. Until then, this many partners are tried in either direction after
# the first swap.
NEAR_ENOUGH = 8
TRIES = 16
# From home, parts considered for a swap: this many that can help, among this many of the lightest; more for
# a swap that is all a part needs. Still more hardly save movement, and take time.
PARTNERS = 16
# With more samples than this, the lightest parts are much alike, and fewer will do; or with groups, which are
# brought together again after the search.
MANY_SAMPLES, FEW_PARTNERS = 8192, 4
CANDIDATES_FOR_ALL, CANDIDATES_FOR_PART = 200, 48
# Samples of a part considered for a swap, evenly spaced by load. Those in between would do little better.
MOST_TRIED = 64
# Samples considered in return for one, where some may belong to a group that the heavy part has.
RETURNS = 6
# Parts considered for a sample to join others of its group.
MOST_TO_JOIN = 8
# Swaps to make: none, those at a price for each move, and where there is no such swap any other.
NO_SWAPS, CHEAP_SWAPS, ALL_SWAPS = 0, 1, 2


@compiled
def refine_to(task: Task, part_of: np.ndarray) -> None:
    """Changes `part_of` until no part is above the target load, or no swap helps."""
    parts = make_parts(task, part_of)
    least = max(int(RESOLUTION * task.work.sum() / len(parts.load)), 1)
    most_looks = LOOKS * len(part_of) * math.frexp(float(len(part_of)))[1]
    while len(parts.load) > 1:
        heavy = parts.by_load[-1]
        if parts.load[heavy] <= task.target:
            break
        gives, partner, returns, looks = find_swap(parts, heavy, least, most_looks)
        most_looks -= looks
        if partner == NONE or most_looks < 0:
            break
        swap(parts, heavy, gives, partner, returns)


@inner
def find_swap(parts: Parts, heavy: int, least: int, most_looks: int) -> tuple[int, int, int, int]:
    """Finds the swap that most lowers the larger of two loads, by at least `least`.

    Example: a part of load 100 should give the lightest, of load 60, a difference of 20: for its sample of
    50, it looks from samples of 30 on. One of 32 in a part of load 64 makes both loads 82.

    Returns:
        (sample given, partner, sample returned, partners looked at); the partner is NONE if there is no such
        swap among the first `most_looks`.
    """
    part_of, loads = parts.part_of, parts.load
    work, load, lightest = parts.work, loads[heavy], loads[parts.by_load[0]]
    below = load - least + 1  # what the larger load has to be under
    enough = load - (load - lightest) // 2 + (load - lightest) // NEAR_ENOUGH
    gives, partner, returns, looks = NONE, NONE, NONE, 0
    taker = NONE if parts.size[heavy] == parts.fewest else _find_taker(parts, heavy, NONE)
    for at in range(parts.start[heavy], parts.start[heavy] + parts.size[heavy]):
        # 1. The best sample in return takes half the distance to the lightest part.
        i = parts.members[at]
        middle = _find_at_most(work, i + 1, work[i] - (load - lightest) // 2)
        # 2. From there, try lighter and heavier ones, as long as they can be better than the best so far.
        for step in (1, -1):
            j = middle if step == 1 else middle - 1
            while i < j < len(work) and (partner == NONE or abs(j - middle) <= TRIES):
                difference = work[i] - work[j]
                if (lightest + difference if step == 1 else load - difference) >= below:
                    break
                larger = max(load - difference, loads[part_of[j]] + difference)
                if larger < below and part_of[j] != heavy and fits(parts, heavy, i, part_of[j], j):
                    below, gives, partner, returns = larger, i, part_of[j], j
                j += step
                looks += 1
        # 3. Where sizes allow it, the lightest part may take the sample for none.
        if taker != NONE and max(load - work[i], loads[taker] + work[i]) < below:
            other = _find_taker(parts, heavy, i)  # the same, unless it has no room for its tokens
            if other != NONE and max(load - work[i], loads[other] + work[i]) < below:
                below, gives, partner, returns = max(load - work[i], loads[other] + work[i]), i, other, NONE
        if looks > most_looks or (partner != NONE and below <= enough):
            break
    return gives, partner, returns, looks


@inner
def _find_taker(parts: Parts, giver: int, sample: int) -> int:
    """The lightest part with room for one more sample, and for this one unless it is NONE; else NONE."""
    for taker in parts.by_load:
        if taker == giver or parts.size[taker] == parts.most:
            continue
        if sample == NONE or fits(parts, giver, sample, taker, NONE):
            return taker
    return NONE


@inner
def _find_at_most(work: np.ndarray, start: int, value: int) -> int:
    """The first sample from `start` on whose work is at most `value`; the number of samples if none is."""
    left = len(work) - start
    while left > 1:  # without a branch, which the processor would mispredict every other time
        half = left // 2
        start += half * (work[start + half - 1] > value)
        left -= half
    return start + (left == 1 and work[start] > value)


@compiled
def search_to(task: Task, part_of: np.ndarray, costs: Costs, swaps: int) -> bool:
    """Changes `part_of` until no part is above the target load, if it gets there; then sends samples home."""
    parts = make_parts(task, part_of)
    count_copies(costs.copies, part_of)
    is_there = swaps == NO_SWAPS or _lighten(parts, costs, swaps == ALL_SWAPS)
    if is_there:
        _send_home(parts, costs)
    return is_there


@inner
def _lighten(parts: Parts, costs: Costs, at_any_price: bool) -> bool:
    """Makes swaps until no part is above the target, or none helps; whether it got there."""
    target = parts.target
    least = max(int(RESOLUTION * target), 1)
    while len(parts.load) > 1 and parts.load[parts.by_load[-1]] > target:
        heavy = parts.by_load[-1]
        gives, partner, returns = _find_cheap_swap(parts, costs, heavy, least)
        if partner == NONE and at_any_price:
            most_looks = costs.looks[1] - costs.looks[0]
            gives, partner, returns, looks = find_swap(parts, heavy, least, most_looks)
            costs.looks[0] += looks
        if partner == NONE or costs.looks[0] > costs.looks[1]:
            return False
        swap_and_count(parts, costs.copies, heavy, gives, partner, returns)
    return True


@inner
def _find_cheap_swap(parts: Parts, costs: Costs, heavy: int, least: int) -> tuple[int, int, int]:
    """(sample given, partner, sample returned); the partner is NONE if no swap takes at least `least`.

    Swaps that bring the heavy part to the target at once come first; of either kind, those in its node.
    """
    has_nodes = costs.node_of[0] != costs.node_of[-1]
    for relief, candidates in (
        (parts.load[heavy] - parts.target, CANDIDATES_FOR_ALL),
        (least, CANDIDATES_FOR_PART),
    ):
        for near in (True, False):
            if near and not has_nodes:
                continue
            found = _find_best_swap(parts, costs, heavy, relief, near, candidates)
            if found[1] != NONE:
                return found
    return NONE, NONE, NONE


@inner
def _find_best_swap(
    parts: Parts, costs: Costs, heavy: int, least: int, near: bool, candidates: int
) -> tuple[int, int, int]:
    """The swap that takes most off the load above the target for its cost, at least `least`.

    The partner is one of the `candidates` lightest parts, of the same node if `near`. It may end above the
    target, but that counts against the swap: of two giants in one part, one leaves although no part has room
    for it.

    Example: the target is 80, a part has 100, and its partner 70. A sample of 25 for one of 10 takes 15 off
    the excess of 20, and leaves the partner 5 above the target: relief is 10. At a cost of 2 it is worth 5.
    """
    load, members, home = parts.load, parts.members, costs.home
    work, needed = parts.work, load[heavy] - parts.target
    first, end = parts.start[heavy], parts.start[heavy] + parts.size[heavy]
    step = max(parts.size[heavy] // MOST_TRIED, 1)
    has_groups = len(costs.copies.cost) > 0
    most_returned = max(RETURNS // step, 1) if has_groups else 1
    looks = 0  # written once, because in the loop that would slow it
    gives, partner, returns, best = NONE, NONE, NONE, 0.0
    partners, most_partners = 0, max(PARTNERS // step, 1)
    if len(work) > MANY_SAMPLES or has_groups:
        most_partners = min(most_partners, FEW_PARTNERS)
    for taker in parts.by_load:
        # 1. Partners from the lightest part on, as long as they have room.
        headroom = parts.target - load[taker]
        if headroom < least or partners == most_partners or candidates == 0:
            break
        if taker == heavy or (near and costs.node_of[taker] != costs.node_of[heavy]):
            continue
        may_give = parts.size[heavy] > parts.fewest and parts.size[taker] < parts.most
        start, stop = parts.start[taker], parts.start[taker] + parts.size[taker]
        lightest = 0 if may_give or start == stop else work[members[stop - 1]]
        most = max(needed, headroom)
        candidates -= 1
        helps = may_give
        for at in range(first, end, step):
            i = members[at]
            if work[i] - lightest < least:
                break
            looks += 1
            # 2. Skip a sample whose swaps all cost too much. This one is at least its price, unless the
            # sample that comes back goes home, or to its group.
            copied = copying_cost(costs.copies, i, heavy, taker) if has_groups else 0
            price = max((costs.to_move[i] if home[i] == heavy else 0) + copied, 1)
            if min(needed, headroom, work[i] - lightest) <= best * price:
                continue
            # 3. Samples to return, from the lightest on, because it is the cheapest; last, none.
            j = find_below(work, members, start, stop, work[i] - most)
            if j == start and not may_give:
                continue
            moved = moving_cost(costs, i, heavy, taker)
            for option in range(min(most_returned, j - start) + may_give):
                returned = members[j - 1 - option] if option < min(most_returned, j - start) else NONE
                difference = work[i] - (work[returned] if returned != NONE else 0)
                relief = min(difference, needed) - max(difference - headroom, 0)
                if relief < least:
                    continue
                helps = True
                looks += 1
                if has_groups:
                    cost = moved + returning_cost(costs, i, copied, heavy, taker, returned)
                else:
                    cost = moved + moving_cost(costs, returned, taker, heavy)
                value = relief / max(cost, 1)
                if value > best and fits(parts, heavy, i, taker, returned):
                    gives, partner, returns, best = i, taker, returned, value
        partners += helps
    costs.looks[0] += looks
    return gives, partner, returns


@inner
def _send_home(parts: Parts, costs: Costs) -> None:
    """Sends samples that are away nearer to home, alone or in a swap, where the target allows."""
    for i in range(len(parts.part_of)):
        if costs.looks[0] > costs.looks[1]:
            break
        part, home, group = parts.part_of[i], costs.home[i], costs.copies.group_of[i]
        cheapest, goes_to, returns = 0, NONE, NONE
        # 1. On another node, it may go to any part of its own, from `first` to `end`; else only home.
        first, end = home, home + 1
        if part == home:
            end = home
        elif costs.node_of[part] != costs.node_of[home]:
            while first > 0 and costs.node_of[first - 1] == costs.node_of[home]:
                first -= 1
            while end < len(costs.node_of) and costs.node_of[end] == costs.node_of[home]:
                end += 1
        # 2. It may also join others of its group.
        slot, joins = 0, 0
        if group != NONE:
            slot, joins = costs.copies.start[group], min(costs.copies.used[group], MOST_TO_JOIN)
        # 3. Take the cheapest of these moves.
        for goal in range(end - first + joins):
            to = first + goal if goal < end - first else costs.copies.part[slot + goal - (end - first)]
            if to != part:
                cost, returned = _find_return(parts, costs, i, to)
                if cost < cheapest:
                    cheapest, goes_to, returns = cost, to, returned
        if goes_to != NONE:
            swap_and_count(parts, costs.copies, part, i, goes_to, returns)


@inner
def _find_return(parts: Parts, costs: Costs, sample: int, to: int) -> tuple[int, int]:
    """(cost of moving a sample to this part, what comes back for it); the cost is 0 if none saves any."""
    load, members, part = parts.load, parts.members, parts.part_of[sample]
    work, cheapest, returns = parts.work, 0, NONE
    moved, copied = moving_cost(costs, sample, part, to), copying_cost(costs.copies, sample, part, to)
    if moved + copied >= 0:
        return 0, NONE
    # What comes back has at least the work that `to` has no room for, and at most what `part` has room for.
    least, most = work[sample] - (parts.target - load[to]), work[sample] + parts.target - load[part]
    start, stop = parts.start[to], parts.start[to] + parts.size[to]
    first = find_below(work, members, start, stop, most + 1)
    end = find_below(work, members, start, stop, least)
    may_go = least <= 0 <= most and parts.size[part] > parts.fewest and parts.size[to] < parts.most
    step = max((end - first) // MOST_TRIED, 1)
    for at in range(first, end + may_go * step, step):
        returned = members[at] if at < end else NONE
        costs.looks[0] += 1
        cost = moved + returning_cost(costs, sample, copied, part, to, returned)
        if cost < cheapest and fits(parts, part, sample, to, returned):
            cheapest, returns = cost, returned
    return cheapest, returns
