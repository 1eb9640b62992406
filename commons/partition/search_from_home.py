"""The search from home: swaps with a price on every move.

The heaviest part swaps with a light one, at the lowest price for what the swap takes off it. Where no such
swap is left, the unpriced search makes the next one. Last, samples that are away go home wherever the target
allows. Where samples belong together, a part that gets the first sample of a group pays for a copy, and one
that gives its last sample away saves one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from .compiled import compiled, inner
from .copies import Copies, copies_added, swap_counted
from .from_scratch import refined_from_scratch, time_by_differencing
from .search import (
    NONE,
    RESOLUTION,
    Limits,
    Parts,
    base_of,
    first_below,
    fits,
    lightening_swap,
    make_parts,
    sum_per_part,
    swap,
    time_of,
)

# A byte to another node costs as much as this many bytes within one: nodes are left last.
ACROSS_NODES = 1000
# Parts considered for a swap: this many that can help, among this many of the lightest; more for a swap that
# is all a part needs. Still more hardly save movement, and take time.
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
# Swaps looked at: this many × samples × the logarithm of their number. Then the search takes what it has.
# For groups it starts several times.
LOOKS, LOOKS_FOR_GROUPS = 16, 64
# Swaps to make: none, those at a price for each move, and where there is no such swap any other.
NO_SWAPS, CHEAP_SWAPS, ALL_SWAPS = 0, 1, 2


class Costs(NamedTuple):
    """Costs of having a sample away from home, and from its group; all int64.

    Attributes:
        home: `[samples]`, the part that each is in at first.
        of_move: `[samples]`, the cost of each when it moves.
        node_of: `[parts]`, ascending.
        copies: of groups; there are none where all samples may move alone.
        looks: `[2]`, swaps looked at so far, and how many may be; all searches of a plan share it.
    """

    home: np.ndarray
    of_move: np.ndarray
    node_of: np.ndarray
    copies: Copies
    looks: np.ndarray


def costs_of_moves(home: np.ndarray, of_move: np.ndarray, node_of: np.ndarray) -> Costs:
    """Costs of samples that belong to no groups; arrays as in `Costs`."""
    none = np.zeros(0, dtype=np.int64)
    copies = Copies(np.full(len(home), NONE), none, none, none, none, none)
    costs = Costs(home, of_move, node_of, copies, np.zeros(2, dtype=np.int64))
    allow_more_looks(costs, LOOKS)
    return costs


def allow_more_looks(costs: Costs, looks: int) -> None:
    """Lets the search look at `looks` × n × log2(n) more swaps of n samples."""
    count = len(costs.home)
    costs.looks[1] = costs.looks[0] + looks * count * max(count.bit_length(), 1)


@compiled
def even_out(work: np.ndarray, part_of: np.ndarray, base: np.ndarray, limits: Limits) -> None:
    """Changes `part_of` until all sizes are within the limits, one move from the largest part at a time."""
    parts = make_parts(work, np.zeros(len(work), dtype=np.int64), part_of, base)
    while True:
        giver = taker = NONE + 1  # numba compiles `swap` anew for literals
        for part in range(len(base)):
            if parts.size[part] > parts.size[giver]:
                giver = part
            if parts.size[part] < parts.size[taker]:
                taker = part
        if parts.size[taker] >= limits.fewest and parts.size[giver] <= limits.most:
            return
        if parts.size[taker] >= limits.fewest:
            for taker in parts.by_load:
                if parts.size[taker] < limits.most:
                    break
        wanted = (parts.load[giver] - parts.load[taker]) // 2
        at, last = parts.start[giver], parts.start[giver] + parts.size[giver] - 1
        while at < last and work[parts.members[at]] > wanted:
            at += 1
        swap(parts, giver, parts.members[at], taker, NONE)


def nearest_home(part_of: np.ndarray, costs: Costs, speeds: np.ndarray) -> np.ndarray:
    """The same partition, its parts renumbered so that much stays at home: the largest matches first.

    Parts keep their speeds.
    """
    num_parts = len(speeds)
    at_home = sum_per_part(costs.of_move, part_of * num_parts + costs.home, num_parts * num_parts)
    matches = np.flatnonzero(at_home)
    number, is_taken = _matched(matches[np.argsort(-at_home[matches], kind="stable")], speeds)
    left, free = np.flatnonzero(number == NONE), np.flatnonzero(~is_taken)
    left = left[np.argsort(speeds[left], kind="stable")]
    number[left] = free[np.argsort(speeds[free], kind="stable")]
    return number[part_of]


@compiled
def _matched(matches: np.ndarray, speeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number that each part gets, NONE for the others; and which numbers are taken.

    A match is part × number of parts + number, the best one first.
    """
    num_parts = len(speeds)
    number, is_taken = np.empty(num_parts, dtype=np.int64), np.zeros(num_parts, dtype=np.bool_)
    for part in range(num_parts):
        number[part] = NONE
    for match in matches:
        part, home = match // num_parts, match % num_parts
        if number[part] == NONE and not is_taken[home] and speeds[part] == speeds[home]:
            number[part] = home
            is_taken[home] = True
    return number, is_taken


def move(
    work: np.ndarray,
    tokens: np.ndarray,
    part_of: np.ndarray,
    speeds: np.ndarray,
    limits: Limits,
    costs: Costs,
    target: int,
    tolerance: float,
) -> None:
    """Changes `part_of` until no part takes longer than the target; then sends home what may go.

    Where that fails, the target becomes (1 + tolerance) × the longest time of a search from scratch, and a
    tenth of the tolerance more, because the last step to it would take more moves than all before; but no
    more than the longest time of differencing. Where that fails, too, the partition from scratch is taken, or
    the one given if that is better: speeds or `max_tokens` can make it so.
    """
    given = part_of.copy()
    if search_to(work, tokens, part_of, base_of(speeds, target), limits, costs, target, CHEAP_SWAPS):
        return
    scratch = refined_from_scratch(work, tokens, speeds, limits, 0.0)
    at_first = time_of(work, given, speeds)
    attained = longest = min(at_first, time_of(work, part_of, speeds))
    if scratch[-1] != NONE:
        attained = time_of(work, scratch, speeds)
    relaxed = min(int(min(attained * (1 + 1.1 * tolerance), 2.0**61)), longest)
    relaxed = max(target, min(relaxed, time_by_differencing(work, tokens, speeds, limits)))
    for time in (target, relaxed) if attained <= target else (relaxed,):
        if search_to(work, tokens, part_of, base_of(speeds, time), limits, costs, time, ALL_SWAPS):
            return
    reached = time_of(work, part_of, speeds)
    if scratch[-1] != NONE and attained <= min(at_first, reached):
        part_of[:] = nearest_home(scratch, costs, speeds)
    elif at_first < reached:
        part_of[:] = given
    search_to(work, tokens, part_of, base_of(speeds, relaxed), limits, costs, relaxed, NO_SWAPS)


@compiled
def search_to(
    work: np.ndarray,
    tokens: np.ndarray,
    part_of: np.ndarray,
    base: np.ndarray,
    limits: Limits,
    costs: Costs,
    target: int,
    swaps: int,
) -> bool:
    """Changes `part_of` until no part is above the target load; then sends home what may go.

    Loads come on top of `base` `[parts]`. Returns whether it got there; with NO_SWAPS, what may go is sent
    home in any case.
    """
    parts = make_parts(work, tokens, part_of, base)
    is_there = swaps == NO_SWAPS or _lighten(parts, limits, costs, target, swaps == ALL_SWAPS)
    if is_there:
        send_home(parts, limits, costs, target)
    return is_there


@inner
def _lighten(parts: Parts, limits: Limits, costs: Costs, target: int, at_any_price: bool) -> bool:
    """Makes swaps until no part is above the target, or none helps; whether it got there."""
    least = max(int(RESOLUTION * target), 1)
    while len(parts.load) > 1 and parts.load[parts.by_load[-1]] > target:
        heavy = parts.by_load[-1]
        gives, partner, returns = _cheapest_swap(parts, limits, costs, heavy, target, least)
        if partner == NONE and at_any_price:
            most_looks = costs.looks[1] - costs.looks[0]
            gives, partner, returns, looks = lightening_swap(parts, limits, heavy, least, most_looks)
            costs.looks[0] += looks
        if partner == NONE or costs.looks[0] > costs.looks[1]:
            return False
        swap_counted(parts, costs.copies, heavy, gives, partner, returns)
    return True


@inner
def _cheapest_swap(
    parts: Parts, limits: Limits, costs: Costs, heavy: int, target: int, least: int
) -> tuple[int, int, int]:
    """(sample given, partner, sample returned); the partner is NONE if no swap takes at least `least`.

    First come swaps that bring the heavy part to the target at once, within its node and then anywhere. Then
    come those that take part of it, again within the node first.
    """
    has_nodes = costs.node_of[0] != costs.node_of[-1]
    for relief, candidates in (
        (parts.load[heavy] - target, CANDIDATES_FOR_ALL),
        (least, CANDIDATES_FOR_PART),
    ):
        for near in (True, False):
            if near and not has_nodes:
                continue
            found = _best_swap(parts, limits, costs, heavy, target, relief, near, candidates)
            if found[1] != NONE:
                return found
    return NONE, NONE, NONE


@inner
def _best_swap(
    parts: Parts,
    limits: Limits,
    costs: Costs,
    heavy: int,
    target: int,
    least: int,
    near: bool,
    candidates: int,
) -> tuple[int, int, int]:
    """The swap that takes most off the load above the target for its cost, at least `least`.

    The partner is one of the `candidates` lightest parts, of the same node if `near`. It may end above the
    target, but that counts against the swap: of two giants in one part, one leaves although no part has room
    for it.
    """
    work, load, members, home = parts.work, parts.load, parts.members, costs.home
    needed = load[heavy] - target
    first, end = parts.start[heavy], parts.start[heavy] + parts.size[heavy]
    step = max(parts.size[heavy] // MOST_TRIED, 1)
    has_groups = len(costs.copies.of_copy) > 0
    most_returned = max(RETURNS // step, 1) if has_groups else 1
    looks = 0  # written once, because in the loop that would slow it
    gives, partner, returns, best = NONE, NONE, NONE, 0.0
    partners, most_partners = 0, max(PARTNERS // step, 1)
    if len(work) > MANY_SAMPLES or has_groups:
        most_partners = min(most_partners, FEW_PARTNERS)
    for taker in parts.by_load:
        headroom = target - load[taker]
        if headroom < least or partners == most_partners or candidates == 0:
            break
        if taker == heavy or (near and costs.node_of[taker] != costs.node_of[heavy]):
            continue
        may_give = parts.size[heavy] > limits.fewest and parts.size[taker] < limits.most
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
            copied = copies_added(costs.copies, i, heavy, taker) if has_groups else 0
            # A swap costs this at least, unless the sample that comes back goes home, or to its group.
            price = max((costs.of_move[i] if home[i] == heavy else 0) + copied, 1)
            if min(needed, headroom, work[i] - lightest) <= best * price:
                continue
            # From the lightest sample that may come back on, because it is the cheapest.
            j = first_below(work, members, start, stop, work[i] - most)
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
                    cost = moved + cost_of_return(costs, i, copied, heavy, taker, returned)
                else:
                    cost = moved + moving_cost(costs, returned, taker, heavy)
                value = relief / max(cost, 1)
                if value > best and fits(parts, limits, heavy, i, taker, returned):
                    gives, partner, returns, best = i, taker, returned, value
        partners += helps
    costs.looks[0] += looks
    return gives, partner, returns


@njit(inline="always")
def moving_cost(costs: Costs, sample: int, source: int, to: int) -> int:
    """The cost of moving the sample from one part to another; negative on the way home, 0 for NONE."""
    if sample == NONE:
        return 0
    return _cost_of_being_in(costs, sample, to) - _cost_of_being_in(costs, sample, source)


@njit(inline="always")
def _cost_of_being_in(costs: Costs, sample: int, part: int) -> int:
    home = costs.home[sample]
    if part == home:
        return 0
    return costs.of_move[sample] * (1 if costs.node_of[part] == costs.node_of[home] else ACROSS_NODES)


@inner
def cost_of_return(costs: Costs, sample: int, copied: int, giver: int, taker: int, returned: int) -> int:
    """The cost of copies of a swap, and of moving the sample returned; `copied` is that of the other."""
    if returned == NONE:
        return copied
    moved = moving_cost(costs, returned, taker, giver)
    group = costs.copies.group_of[returned]
    if group != NONE and group == costs.copies.group_of[sample]:
        return moved  # each takes the other's place
    return copied + moved + copies_added(costs.copies, returned, taker, giver)


@inner
def send_home(parts: Parts, limits: Limits, costs: Costs, target: int) -> None:
    """Sends samples that are away nearer to home, alone or in a swap, where the target allows.

    One that is on another node may go to any part of its own, any other one only home; and one whose group
    is in several parts to each of these.
    """
    for i in range(len(parts.work)):
        if costs.looks[0] > costs.looks[1]:
            break
        part, home, group = parts.part_of[i], costs.home[i], costs.copies.group_of[i]
        cheapest, goes_to, returns = 0, NONE, NONE
        first, end = home, home + 1
        if part == home:
            end = home
        elif costs.node_of[part] != costs.node_of[home]:
            while first > 0 and costs.node_of[first - 1] == costs.node_of[home]:
                first -= 1
            while end < len(costs.node_of) and costs.node_of[end] == costs.node_of[home]:
                end += 1
        slot, joins = 0, 0
        if group != NONE:
            slot, joins = costs.copies.start[group], min(costs.copies.used[group], MOST_TO_JOIN)
        for goal in range(end - first + joins):
            to = first + goal if goal < end - first else costs.copies.part[slot + goal - (end - first)]
            if to != part:
                cost, returned = _cheapest_return(parts, limits, costs, target, i, to)
                if cost < cheapest:
                    cheapest, goes_to, returns = cost, to, returned
        if goes_to != NONE:
            swap_counted(parts, costs.copies, part, i, goes_to, returns)


@inner
def _cheapest_return(
    parts: Parts, limits: Limits, costs: Costs, target: int, sample: int, to: int
) -> tuple[int, int]:
    """(cost of moving a sample to this part, what comes back for it); the cost is 0 if none saves any."""
    work, load, members, part = parts.work, parts.load, parts.members, parts.part_of[sample]
    cheapest, returns = 0, NONE
    moved, copied = moving_cost(costs, sample, part, to), copies_added(costs.copies, sample, part, to)
    if moved + copied >= 0:
        return 0, NONE
    # What comes back has at least the work that `to` has no room for, and at most what `part` has room for.
    least, most = work[sample] - (target - load[to]), work[sample] + target - load[part]
    start, stop = parts.start[to], parts.start[to] + parts.size[to]
    first = first_below(work, members, start, stop, most + 1)
    end = first_below(work, members, start, stop, least)
    may_go = least <= 0 <= most and parts.size[part] > limits.fewest and parts.size[to] < limits.most
    step = max((end - first) // MOST_TRIED, 1)
    for at in range(first, end + may_go * step, step):
        returned = members[at] if at < end else NONE
        costs.looks[0] += 1
        cost = moved + cost_of_return(costs, sample, copied, part, to, returned)
        if cost < cheapest and fits(parts, limits, part, sample, to, returned):
            cheapest, returns = cost, returned
    return cheapest, returns
