"""The search for even tokens: swaps that keep the target load and take tokens off the fullest part.

Activations follow tokens, and balanced loads are not balanced tokens. Most placements leave room for both: of
two samples, the shorter one has fewer tokens for its load, so parts with many short samples are full.
"""

from __future__ import annotations

import numpy as np

from .compiled import compiled, inner
from .copies import copies_added, swap_counted
from .problem import Problem
from .search import NONE, Limits, Parts, base_of, make_parts, time_of
from .search_from_home import (
    MANY_SAMPLES,
    MOST_TRIED,
    NO_SWAPS,
    Costs,
    cost_of_return,
    costs_of_moves,
    moving_cost,
    search_to,
)

# Of 100 samples, this many more may leave home.
MORE_MOVED = 4
# Parts considered for a swap: this many of the lightest with room; if none of them helps, at most this many.
# More hardly save moves, and take time.
CANDIDATES, MOST_CANDIDATES = 4, 128
# Samples considered in return for one, from the lightest that the target allows.
TRIES = 4
# The search looks at this many pairs of samples at most, times n · log2(n) of n samples.
LOOKS = 8


def level_tokens(problem: Problem, costs: Costs, part_of: np.ndarray, target: int) -> None:
    """Changes `part_of` so that no part has more tokens than `problem.token_goal`, as far as that can be.

    No part takes longer than the target, or than the slowest did before. Tokens of the fullest part never
    grow. At most MORE_MOVED percent of the samples leave home for that; costs of moves count, too.
    """
    amounts = np.bincount(part_of, problem.tokens, minlength=problem.num_parts)
    if amounts.max() <= problem.token_goal:
        return
    work, tokens, speeds, limits = problem.work, problem.tokens, problem.speeds, problem.limits
    most_moved = MORE_MOVED * len(work) // 100
    most_looks = LOOKS * len(work) * len(work).bit_length()
    target = max(target, int(time_of(work, part_of, speeds)))
    goal, base, relieved = problem.token_goal, base_of(speeds, target), part_of.copy()
    most = relieve(work, tokens, relieved, base, limits, costs, target, goal, most_moved, most_looks)
    if most == amounts.max():
        return
    away = np.count_nonzero(part_of != costs.home)
    part_of[:] = relieved
    if costs.home[0] != NONE and len(work) <= MANY_SAMPLES:  # with more, it takes long and sends few home
        limits = limits._replace(max_tokens=max(most, goal))
        search_to(work, tokens, relieved, base, limits, costs, target, NO_SWAPS)
        # Samples that cost nothing to move, or join their group, may have left home for others.
        if np.count_nonzero(relieved != costs.home) <= away + most_moved:
            part_of[:] = relieved


def free_moves(problem: Problem) -> Costs:
    """Costs of samples that have no home."""
    nowhere = np.full_like(problem.work, NONE)
    return costs_of_moves(nowhere, np.zeros_like(nowhere), np.zeros(problem.num_parts, dtype=np.int64))


@compiled
def relieve(
    work: np.ndarray,
    tokens: np.ndarray,
    part_of: np.ndarray,
    base: np.ndarray,
    limits: Limits,
    costs: Costs,
    target: int,
    goal: int,
    most_moved: int,
    most_looks: int,
) -> int:
    """`level_tokens`, with at most `most_moved` more samples away from home, and at most `most_looks`.

    Returns the tokens of the fullest part.
    """
    parts = make_parts(work, tokens, part_of, base)
    full = _fullest(parts)
    while parts.amount[full] > goal and most_looks > 0:
        gives, taker, returns, looks = _relieving_swap(parts, limits, costs, full, target, goal)
        most_looks -= looks
        if taker == NONE:
            break
        most_moved -= _leaves_home(costs, gives, full, taker) + _leaves_home(costs, returns, taker, full)
        if most_moved < 0:
            break
        swap_counted(parts, costs.copies, full, gives, taker, returns)
        full = _fullest(parts)
    return parts.amount[full]


@inner
def _fullest(parts: Parts) -> int:
    """The part with most tokens; of equally full ones the first."""
    full = 0
    for part in range(len(parts.amount)):
        if parts.amount[part] > parts.amount[full]:
            full = part
    return full


@inner
def _leaves_home(costs: Costs, sample: int, source: int, to: int) -> int:
    """1 if the sample leaves home, −1 if it returns; 0 for any other move, and for NONE."""
    if sample == NONE:
        return 0
    home = costs.home[sample]
    return int(to != home) - int(source != home)


@inner
def _relieving_swap(
    parts: Parts, limits: Limits, costs: Costs, full: int, target: int, goal: int
) -> tuple[int, int, int, int]:
    """Finds the swap that takes most tokens above the goal off the full part, for its cost.

    The taker may end above the goal, but that counts against the swap; it ends below what the full part had.
    No part ends above the target.

    Returns:
        (sample given, taker, sample returned, pairs looked at); the taker is NONE if no swap helps.
    """
    work, tokens, members = parts.work, parts.tokens, parts.members
    needed, slack = parts.amount[full] - goal, target - parts.load[full]
    first, end = parts.start[full], parts.start[full] + parts.size[full]
    step = max(parts.size[full] // MOST_TRIED, 1)
    has_groups = len(costs.copies.of_copy) > 0
    gives, partner, returns, best = NONE, NONE, NONE, 0.0
    looks = candidates = 0
    for taker in parts.by_load:
        room, headroom = goal - parts.amount[taker], target - parts.load[taker]
        if taker == full or room <= 0:
            continue
        if candidates == MOST_CANDIDATES or (candidates >= CANDIDATES and partner != NONE):
            break
        candidates += 1
        start, stop = parts.start[taker], parts.start[taker] + parts.size[taker]
        looks += (end - first) // step + stop - start
        may_give = parts.size[full] > limits.fewest and parts.size[taker] < limits.most
        last = start  # behind the lightest sample that may come back
        for at in range(first, end, step):
            i = members[at]
            while last < stop and work[i] - work[members[last]] <= headroom:
                last += 1
            moved = moving_cost(costs, i, full, taker)
            copied = copies_added(costs.copies, i, full, taker) if has_groups else 0
            # A move costs this at least, unless the sample that comes back goes home, or to its group.
            price = max((costs.of_move[i] if costs.home[i] == full else 0) + copied, 1)
            if min(needed, tokens[i]) <= best * price:
                continue
            for option in range(0 if may_give and work[i] <= headroom else 1, TRIES + 1):
                returned = NONE
                if option > 0:
                    if last - option < start or work[members[last - option]] - work[i] > slack:
                        break
                    returned = members[last - option]
                looks += 1
                difference = tokens[i] - (tokens[returned] if returned != NONE else 0)
                relief = min(difference, needed) - max(difference - room, 0)
                if relief <= 0:
                    continue
                cost = moved + cost_of_return(costs, i, copied, full, taker, returned)
                value = relief / max(cost, 1)
                if value > best:
                    gives, partner, returns, best = i, taker, returned, value
    return gives, partner, returns, looks
