"""Exchanges between a part that is too heavy and others, by what they take off it for what they cost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from commons.partition.compiled import compiled
from commons.partition.local_search import RESOLUTION
from commons.partition.parts import NONE, Limits, Parts, first_at_most, fits

# A byte to another node counts as many bytes within one: across nodes last.
ACROSS_NODES = 1000
# Bits of all sizes together, so that as many bytes times ACROSS_NODES are still below 2**63.
SIZE_BITS = 50
# More of any hardly saves movement, and takes time: for each sample of a part that is too heavy, so many
# possible exchanges are compared; of the lightest parts, so many that can take an eighth of what is needed.
TRIES = 32
PARTNERS = 4
WORTHWHILE = 8


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


@compiled
def next_exchange(
    parts: Parts, limits: Limits, costs: Costs, heavy: int, target: int
) -> tuple[int, int, int]:
    """(sample given, partner, sample returned); the partner is NONE if no exchange helps.

    First what brings the heavy part to the target at once; then what relieves it, even if the partner gets
    too much of that; then what takes anything off it. In each of these, partners of the same node come first.
    """
    needed = parts.load[heavy] - target
    headroom = target - parts.load[parts.by_load[0]]
    least = max(int(RESOLUTION * target), 1)
    several_nodes = costs.node_of[0] != costs.node_of[-1]
    for stage in range(3):
        takes = needed if stage == 0 else least
        if takes > headroom:
            continue
        for near in (True, False):
            if near and not several_nodes:
                continue
            if stage == 1:
                found = _best_relief(parts, limits, costs, heavy, target, least, near)
            elif near:
                found = _best_exchange_in_node(parts, limits, costs, heavy, target, takes)
            else:
                found = _best_exchange(parts, limits, costs, heavy, target, takes)
            if found[1] != NONE:
                return found
    return NONE, NONE, NONE


@njit(inline="always")
def _cost_of_being_away(home: int, part: int, size: int, node_of: np.ndarray) -> int:
    """What it costs to have a sample of that home and size in a part."""
    if part == home:
        return 0
    return size * (1 if node_of[part] == node_of[home] else ACROSS_NODES)


@njit(inline="always")
def moving_cost(
    sample: int, of: int, to: int, home: np.ndarray, size: np.ndarray, node_of: np.ndarray
) -> int:
    """What it costs to move the sample from one part to another; negative on the way home, 0 for NONE."""
    if sample == NONE:
        return 0
    return _cost_of_being_away(home[sample], to, size[sample], node_of) - _cost_of_being_away(
        home[sample], of, size[sample], node_of
    )


@compiled
def _best_exchange(
    parts: Parts, limits: Limits, costs: Costs, heavy: int, target: int, least: int
) -> tuple[int, int, int]:
    """The exchange that takes most off the heavy part for what it costs.

    It takes at least `least` and leaves the partner within the target. What it takes beyond what the heavy
    part has too much counts for nothing.
    """
    work, part_of, loads = parts.work, parts.part_of, parts.load
    home, size, node_of = costs.home, costs.size, costs.node_of
    needed = loads[heavy] - target
    headroom = target - loads[parts.by_load[0]]
    gives, partner, returns, best = NONE, NONE, NONE, 0.0
    open_part = _lightest_open(parts, limits, heavy)
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
            if taker != heavy and loads[taker] + difference <= target:
                tries += 1
                cost = moving_cost(i, heavy, taker, home, size, node_of)
                cost += moving_cost(j, taker, heavy, home, size, node_of)
                value = min(difference, needed) / max(cost, 1)
                if value > best and fits(parts, limits, heavy, i, taker, j):
                    gives, partner, returns, best = i, taker, j, value
            j -= 1
        if open_part == NONE or loads[open_part] + work[i] > target:
            continue
        for taker in (home[i], open_part):
            is_open = taker != heavy and parts.size[taker] < limits.most
            if is_open and loads[taker] + work[i] <= target:
                cost = moving_cost(i, heavy, taker, home, size, node_of)
                value = min(work[i], needed) / max(cost, 1)
                if value > best and fits(parts, limits, heavy, i, taker, NONE):
                    gives, partner, returns, best = i, taker, NONE, value
    return gives, partner, returns


@compiled
def _best_exchange_in_node(
    parts: Parts, limits: Limits, costs: Costs, heavy: int, target: int, least: int
) -> tuple[int, int, int]:
    """As `_best_exchange`, with a partner of the same node; as these are few, each is searched by itself."""
    work, members, loads = parts.work, parts.members, parts.load
    home, size, node_of = costs.home, costs.size, costs.node_of
    needed = loads[heavy] - target
    gives, partner, returns, best = NONE, NONE, NONE, 0.0
    first = np.searchsorted(node_of, node_of[heavy])
    end = np.searchsorted(node_of, node_of[heavy], side="right")
    for taker in range(first, end):
        headroom = target - loads[taker]
        if taker == heavy or headroom < least:
            continue
        may_give = parts.size[heavy] > limits.fewest and parts.size[taker] < limits.most
        j, end_j = parts.start[taker], parts.start[taker] + parts.size[taker]
        for at in range(parts.start[heavy], parts.start[heavy] + parts.size[heavy]):
            i = members[at]
            # The lightest sample that the partner can give in return, because it is the cheapest.
            while j < end_j and work[i] - work[members[j]] <= headroom:
                j += 1
            returned = members[j - 1] if j > parts.start[taker] else NONE
            if may_give and work[i] <= headroom:
                returned = NONE
            elif returned == NONE:
                continue
            difference = work[i] - (work[returned] if returned != NONE else 0)
            if difference < least:
                continue
            cost = moving_cost(i, heavy, taker, home, size, node_of)
            cost += moving_cost(returned, taker, heavy, home, size, node_of)
            value = min(difference, needed) / max(cost, 1)
            if value > best and fits(parts, limits, heavy, i, taker, returned):
                gives, partner, returns, best = i, taker, returned, value
    return gives, partner, returns


@compiled
def _lightest_open(parts: Parts, limits: Limits, giver: int) -> int:
    """The lightest part that the giver may give a sample for nothing, as far as sizes go; NONE if none is."""
    if parts.size[giver] == limits.fewest:
        return NONE
    for taker in parts.by_load:
        if taker != giver and parts.size[taker] < limits.most:
            return taker
    return NONE


@njit(inline="always")
def _is_worthwhile(parts: Parts, heavy: int, taker: int, needed: int, least: int) -> bool:
    """Whether an exchange for the lightest sample of `taker` takes a good share of what is needed."""
    work, members = parts.work, parts.members
    heaviest, lightest = members[parts.start[taker]], members[parts.start[taker] + parts.size[taker] - 1]
    at, last = parts.start[heavy], parts.start[heavy] + parts.size[heavy] - 1
    while at < last and work[members[at]] - work[heaviest] > needed:
        at += 1
    return work[members[at]] - work[lightest] >= max(least, needed // WORTHWHILE)


@compiled
def _best_relief(
    parts: Parts, limits: Limits, costs: Costs, heavy: int, target: int, least: int, near: bool
) -> tuple[int, int, int]:
    """The exchange that takes most off what all parts have above the target, for what it costs.

    The partner, one of the lightest, may end above the target, but what it then has too much counts against:
    of two giants in one part, one leaves although no part has room for it. `near` asks for a partner of the
    same node.
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
        if taker == heavy or (near and node_of[taker] != node_of[heavy]):
            continue
        may_give = parts.size[heavy] > limits.fewest and parts.size[taker] < limits.most
        j, end_j = parts.start[taker], parts.start[taker] + parts.size[taker]
        if not may_give and (j == end_j or not _is_worthwhile(parts, heavy, taker, needed, least)):
            continue
        partners += 1
        for at in range(first, end):
            i = members[at]
            price = size[i] if home[i] == heavy else 1
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
                if relief < least or relief <= best * price:
                    continue
                cost = moving_cost(i, heavy, taker, home, size, node_of)
                cost += moving_cost(returned, taker, heavy, home, size, node_of)
                value = relief / max(cost, 1)
                if value > best and fits(parts, limits, heavy, i, taker, returned):
                    gives, partner, returns, best = i, taker, returned, value
    return gives, partner, returns
