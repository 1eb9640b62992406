"""The search for even tokens: swaps that keep the target load and take tokens off the fullest part.

Activations follow tokens, and balanced loads are not balanced tokens. Most placements leave room for both: of
two samples, the shorter one has fewer tokens for its load, so parts with many short samples are full.
"""

from __future__ import annotations

import numpy as np

from .compiled import compiled, inner
from .costs import Costs, copying_cost, count_copies, moving_cost, returning_cost, swap_and_count
from .parts import NONE, Parts, Task, make_parts
from .problem import Problem
from .search import MANY_SAMPLES, MOST_TRIED, NO_SWAPS, search_to

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

    No part takes longer than the target, or than the slowest did before, nor has more than the fullest had.
    """
    amounts = np.bincount(part_of, problem.tokens, minlength=problem.num_parts)
    if amounts.max() <= problem.token_goal:
        return
    count = len(part_of)
    most_moved, most_looks = MORE_MOVED * count // 100, LOOKS * count * count.bit_length()
    task, goal = problem.within(max(target, problem.time(part_of))), problem.token_goal
    relieved = part_of.copy()
    most = relieve(task, relieved, costs, goal, most_moved, most_looks)
    if most == amounts.max():
        return
    away = np.count_nonzero(part_of != costs.home)
    part_of[:] = relieved
    if costs.home[0] != NONE and count <= MANY_SAMPLES:  # with more, it takes long and sends few home
        search_to(task._replace(max_tokens=max(most, goal)), relieved, costs, NO_SWAPS)
        # Samples that cost nothing to move, or join their group, may have left home for others.
        if np.count_nonzero(relieved != costs.home) <= away + most_moved:
            part_of[:] = relieved


@compiled
def relieve(
    task: Task, part_of: np.ndarray, costs: Costs, goal: int, most_moved: int, most_looks: int
) -> int:
    """`level_tokens`, with at most `most_moved` more samples away; returns the tokens of the fullest part."""
    parts = make_parts(task, part_of)
    count_copies(costs.copies, part_of)
    full = np.argmax(parts.amount)
    while parts.amount[full] > goal and most_looks > 0:
        gives, taker, returns, looks = _find_relief(parts, costs, full, goal)
        most_looks -= looks
        if taker == NONE:
            break
        most_moved -= _leaves_home(costs, gives, full, taker) + _leaves_home(costs, returns, taker, full)
        if most_moved < 0:
            break
        swap_and_count(parts, costs.copies, full, gives, taker, returns)
        full = np.argmax(parts.amount)
    return parts.amount[full]


@inner
def _leaves_home(costs: Costs, sample: int, source: int, to: int) -> int:
    """1 if the sample leaves home, −1 if it returns; 0 for any other move, and for NONE."""
    if sample == NONE:
        return 0
    home = costs.home[sample]
    return int(to != home) - int(source != home)


@inner
def _find_relief(parts: Parts, costs: Costs, full: int, goal: int) -> tuple[int, int, int, int]:
    """Finds the swap that takes most tokens above the goal off the full part, for its cost.

    The taker may end above the goal, but that counts against the swap; it ends below what the full part had.
    No part ends above the target.

    Example: the goal is 500 tokens, a part has 540, and the taker 480. A sample with 50 tokens for one with
    25 takes 25 off, and leaves the taker 5 above the goal: relief is 20. At a cost of 2 it is worth 10.

    Returns:
        (sample given, taker, sample returned, pairs looked at); the taker is NONE if no swap helps.
    """
    members = parts.members
    work, tokens = parts.work, parts.tokens
    needed, slack = parts.amount[full] - goal, parts.target - parts.load[full]
    first, end = parts.start[full], parts.start[full] + parts.size[full]
    step = max(parts.size[full] // MOST_TRIED, 1)
    has_groups = len(costs.copies.cost) > 0
    gives, partner, returns, best = NONE, NONE, NONE, 0.0
    looks = candidates = 0
    for taker in parts.by_load:
        # 1. Takers with room for tokens, from the lightest part on.
        room, headroom = goal - parts.amount[taker], parts.target - parts.load[taker]
        if taker == full or room <= 0:
            continue
        if candidates == MOST_CANDIDATES or (candidates >= CANDIDATES and partner != NONE):
            break
        candidates += 1
        start, stop = parts.start[taker], parts.start[taker] + parts.size[taker]
        looks += (end - first) // step + stop - start
        may_give = parts.size[full] > parts.fewest and parts.size[taker] < parts.most
        last = start  # behind the lightest sample that may come back
        for at in range(first, end, step):
            i = members[at]
            while last < stop and work[i] - work[members[last]] <= headroom:
                last += 1
            # 2. Skip a sample whose swaps all cost too much. This one is at least its price, unless the
            # sample that comes back goes home, or to its group.
            moved = moving_cost(costs, i, full, taker)
            copied = copying_cost(costs.copies, i, full, taker) if has_groups else 0
            price = max((costs.to_move[i] if costs.home[i] == full else 0) + copied, 1)
            if min(needed, tokens[i]) <= best * price:
                continue
            # 3. In return comes none, or one of the lightest that leave the taker below the target.
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
                cost = moved + returning_cost(costs, i, copied, full, taker, returned)
                value = relief / max(cost, 1)
                if value > best:
                    gives, partner, returns, best = i, taker, returned, value
    return gives, partner, returns, looks
