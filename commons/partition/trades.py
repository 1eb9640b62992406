"""Trades: all samples of a group that a part has for all of another, evened out by samples of a third.

Groups differ in rows. Where parts may not, swaps of one run for another hardly find a match. In a trade, a
third group makes up for the difference, best one that both parts have anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compiled import compiled, inner
from .copies import add_to_group, remove_from_group, samples_in
from .search import NONE, Limits, Parts, grouped, make_parts, swap
from .search_from_home import MOST_TO_JOIN, MOST_TRIED, Costs, moving_cost

# Passes over all groups; each saves less than the one before.
PASSES = 3
# A group goes home if that saves no copy only where it has at least a part's rows ÷ this. Fewer rows find
# their way home one by one, and trying all of them takes long.
MOST_ROWS_TO_HOME = 32


class Held(NamedTuple):
    """Groups that a part has and could give to another; a sample without others counts as one.

    Attributes:
        counts: int64 `[2]`, of groups, and of those tried as a third.
        group: int64 `[groups]`, NONE for a sample without others.
        start: int64 `[groups + 1]`, the first of each in `sample`.
        of_copy: int64 `[groups]`, the cost of a copy.
        is_shared: bool `[groups]`, whether the other part has samples of it, too.
        thirds: int64 `[thirds]`, groups.
        sample: int64 `[samples]`, by group, first those that cost nothing to move.
        work, tokens, cost: int64 `[samples + 1]`, sums over the samples before; costs are those of moves.
        spare: int64 `[2, samples]`, for the group of each member, and the next free place of each group.
    """

    counts: np.ndarray
    group: np.ndarray
    start: np.ndarray
    of_copy: np.ndarray
    is_shared: np.ndarray
    thirds: np.ndarray
    sample: np.ndarray
    work: np.ndarray
    tokens: np.ndarray
    cost: np.ndarray
    spare: np.ndarray


class Trade(NamedTuple):
    """Samples that change places with all of a group in part `source`.

    Attributes:
        cost: negative if it saves any.
        to: the part that the group goes to; NONE for no trade.
        back: the group that comes back, a number in what `to` holds; NONE for none.
        third: another one, a number in what its part holds; NONE for none.
        rows: samples of the third.
        source_gives: whether the third is given by `source`, not by `to`.
    """

    cost: int
    to: int
    back: int
    third: int
    rows: int
    source_gives: bool


@compiled
def trade(
    work: np.ndarray,
    tokens: np.ndarray,
    part_of: np.ndarray,
    base: np.ndarray,
    limits: Limits,
    costs: Costs,
    target: int,
) -> None:
    """Changes `part_of` by trades that save costs and leave no part above the target load.

    Loads come on top of `base` `[parts]`.
    """
    parts, copies = make_parts(work, tokens, part_of, base), costs.copies
    num_groups = len(copies.of_copy)
    by_group, ends = grouped(copies.group_of + 1, num_groups + 1)
    gives, returns = _held(len(work)), _held(len(work))
    number = np.full(num_groups, NONE)
    for _ in range(PASSES):
        is_better = False
        for group in range(num_groups):
            slot = copies.start[group]
            while slot < copies.start[group] + copies.used[group] and costs.looks[0] <= costs.looks[1]:
                source, of_group = copies.part[slot], by_group[ends[group] : ends[group + 1]]
                found = _best_trade(parts, limits, costs, target, of_group, source, gives, returns, number)
                if found.to == NONE:
                    slot += 1
                else:
                    is_better = True
                    _make(parts, costs, group, source, found, gives, returns, number)
        if not is_better:
            return


@inner
def _held(most: int) -> Held:
    """Room for what a part of at most so many samples holds."""
    integers = np.empty((8, most + 1), dtype=np.int64)
    return Held(
        np.empty(2, dtype=np.int64),
        integers[0],
        integers[1],
        integers[2],
        np.empty(most, dtype=np.bool_),
        integers[3],
        integers[4],
        integers[5],
        integers[6],
        integers[7],
        np.empty((2, most), dtype=np.int64),
    )


@inner
def _fill(held: Held, parts: Parts, costs: Costs, part: int, to: int, number: np.ndarray) -> None:
    """Writes what `part` holds, and could give to another part.

    `number` `[groups]` is NONE for each, before and after.
    """
    copies, (number_of, end), count = costs.copies, held.spare, 0
    first, rows = parts.start[part], parts.size[part]
    for at in range(rows):
        group = copies.group_of[parts.members[first + at]]
        entry = count if group == NONE else number[group]
        if entry == NONE:
            entry = count
            number[group] = entry
        if entry == count:
            held.group[entry], held.start[entry + 1] = group, 0
            count += 1
        number_of[at] = entry
        held.start[entry + 1] += 1
    held.start[0] = thirds = 0
    step = max(count // MOST_TRIED, 1)
    for entry in range(count):
        group = held.group[entry]
        held.start[entry + 1] += held.start[entry]
        end[entry] = held.start[entry]
        held.of_copy[entry], held.is_shared[entry] = 0, False
        if group != NONE:
            held.of_copy[entry] = copies.of_copy[group]
            held.is_shared[entry] = samples_in(copies, group, to) > 0
            number[group] = NONE
        if held.is_shared[entry] or entry % step == 0:
            held.thirds[thirds] = entry
            thirds += 1
    held.counts[0], held.counts[1] = count, thirds
    for costs_nothing in (True, False):
        for at in range(rows):
            sample, entry = parts.members[first + at], number_of[at]
            if (moving_cost(costs, sample, part, to) <= 0) == costs_nothing:
                held.sample[end[entry]] = sample
                end[entry] += 1
    held.work[0] = held.tokens[0] = held.cost[0] = 0
    for at in range(rows):
        sample = held.sample[at]
        held.work[at + 1] = held.work[at] + parts.work[sample]
        held.tokens[at + 1] = held.tokens[at] + parts.tokens[sample]
        held.cost[at + 1] = held.cost[at] + moving_cost(costs, sample, part, to)


@inner
def _cost_of(held: Held, entry: int, rows: int) -> int:
    """The cost of giving so many samples of a group, the first ones."""
    start = held.start[entry]
    copies = int(not held.is_shared[entry]) - int(start + rows == held.start[entry + 1])
    return held.cost[start + rows] - held.cost[start] + held.of_copy[entry] * copies


@inner
def _best_trade(
    parts: Parts,
    limits: Limits,
    costs: Costs,
    target: int,
    of_group: np.ndarray,
    source: int,
    gives: Held,
    returns: Held,
    number: np.ndarray,
) -> Trade:
    """The cheapest trade of what `source` has of a group, whose samples are `of_group`.

    It goes to parts that have others of the group, or to the home of one.
    """
    copies, group = costs.copies, costs.copies.group_of[of_group[0]]
    home = NONE
    for sample in of_group:
        if parts.part_of[sample] == source:
            home = costs.home[sample]
            break
    best = Trade(0, NONE, NONE, NONE, 0, False)
    joins = min(copies.used[group], MOST_TO_JOIN)
    for goal in range(joins + 1):
        joins_others = goal < joins
        to = copies.part[copies.start[group] + goal] if joins_others else home
        if to in (source, NONE) or (not joins_others and samples_in(copies, group, to) > 0):
            continue
        rows, cost = 0, -copies.of_copy[group] if joins_others else 0
        for sample in of_group:
            if parts.part_of[sample] == source:
                rows += 1
                cost += moving_cost(costs, sample, source, to)
        if cost >= 0 or (not joins_others and rows * MOST_ROWS_TO_HOME < parts.size[source]):
            continue
        costs.looks[0] += parts.size[source] + parts.size[to]
        _fill(gives, parts, costs, source, to, number)
        _fill(returns, parts, costs, to, source, number)
        best = _evened_out(parts, limits, costs, target, group, source, to, gives, returns, best)
    return best


@inner
def _evened_out(
    parts: Parts,
    limits: Limits,
    costs: Costs,
    target: int,
    group: int,
    source: int,
    to: int,
    gives: Held,
    returns: Held,
    best: Trade,
) -> Trade:
    """The cheapest trade of the group from `source` to `to`, or `best` if none is cheaper."""
    given = _entry_of(gives, group)
    first, end = gives.start[given], gives.start[given + 1]
    of_given = _cost_of(gives, given, end - first)
    for back in range(NONE, returns.counts[0]):
        if costs.looks[0] > costs.looks[1]:
            break
        costs.looks[0] += 1
        rows, load, cost = end - first, gives.work[end] - gives.work[first], of_given
        amount = gives.tokens[end] - gives.tokens[first]
        if back != NONE:
            start, stop = returns.start[back], returns.start[back + 1]
            rows -= stop - start
            load -= returns.work[stop] - returns.work[start]
            amount -= returns.tokens[stop] - returns.tokens[start]
            cost += _cost_of(returns, back, stop - start)
            if returns.group[back] == group:
                continue
        # Rows and load that each part has to give, or may get if negative.
        rows_of_to = max(parts.size[to] + rows - limits.most, limits.fewest - parts.size[source] + rows)
        rows_of_source = max(parts.size[source] - rows - limits.most, limits.fewest - parts.size[to] - rows)
        load_of_to, load_of_source = parts.load[to] + load - target, parts.load[source] - load - target
        to_gives, source_gives = max(rows_of_to, load_of_to) > 0, max(rows_of_source, load_of_source) > 0
        if to_gives == source_gives:
            if not to_gives and cost < best.cost and _fits(parts, limits, source, to, amount):
                best = Trade(cost, to, back, NONE, 0, False)
            continue
        held = returns if to_gives else gives
        least, lightest = (rows_of_to, load_of_to) if to_gives else (rows_of_source, load_of_source)
        most, heaviest = (-rows_of_source, -load_of_source) if to_gives else (-rows_of_to, -load_of_to)
        group_back = returns.group[back] if back != NONE else NONE
        for at in range(held.counts[1]):
            third = held.thirds[at]
            count = _fewest_rows(held, third, least, lightest)
            start = held.start[third]
            work = held.work[start + count] - held.work[start]
            if count > most or work < lightest or work > heaviest or count < least:
                continue
            costs.looks[0] += 1
            total = cost + _cost_of(held, third, count)
            if total >= best.cost or held.group[third] == group or (to_gives and third == back):
                continue
            if held.group[third] != NONE and held.group[third] == group_back:
                continue
            change = held.tokens[start + count] - held.tokens[start]
            if _fits(parts, limits, source, to, amount + (-change if to_gives else change)):
                best = Trade(total, to, back, third, count, source_gives)
    return best


@inner
def _entry_of(held: Held, group: int) -> int:
    entry = 0
    while held.group[entry] != group:
        entry += 1
    return entry


@inner
def _fewest_rows(held: Held, entry: int, least: int, lightest: int) -> int:
    """Samples of a group to give that are at least so many, and so heavy; all if these are too few."""
    start, stop = held.start[entry], held.start[entry + 1]
    count, most = min(max(least, 1), stop - start), stop - start
    while count < most:
        middle = (count + most) // 2
        if held.work[start + middle] - held.work[start] < lightest:
            count = middle + 1
        else:
            most = middle
    return count


@inner
def _fits(parts: Parts, limits: Limits, source: int, to: int, amount: int) -> bool:
    """Whether both parts keep within `limits.max_tokens` if so many tokens go from one to the other."""
    if amount > 0:
        return parts.amount[to] + amount <= limits.max_tokens
    return amount == 0 or parts.amount[source] - amount <= limits.max_tokens


@inner
def _make(
    parts: Parts,
    costs: Costs,
    group: int,
    source: int,
    chosen: Trade,
    gives: Held,
    returns: Held,
    number: np.ndarray,
) -> None:
    to = chosen.to
    _fill(gives, parts, costs, source, to, number)
    _fill(returns, parts, costs, to, source, number)
    given = _entry_of(gives, group)
    _give(parts, costs, gives, given, gives.start[given + 1] - gives.start[given], source, to)
    if chosen.back != NONE:
        rows = returns.start[chosen.back + 1] - returns.start[chosen.back]
        _give(parts, costs, returns, chosen.back, rows, to, source)
    if chosen.third != NONE and chosen.source_gives:
        _give(parts, costs, gives, chosen.third, chosen.rows, source, to)
    elif chosen.third != NONE:
        _give(parts, costs, returns, chosen.third, chosen.rows, to, source)


@inner
def _give(parts: Parts, costs: Costs, held: Held, entry: int, rows: int, source: int, to: int) -> None:
    for sample in held.sample[held.start[entry] : held.start[entry] + rows]:
        swap(parts, source, sample, to, NONE)
        remove_from_group(costs.copies, sample, source)
        add_to_group(costs.copies, sample, to)
