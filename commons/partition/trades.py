"""Trades: all samples of a group that a part has for all of another, evened out by samples of a third.

Groups differ in rows. Where parts may not, swaps of one run for another hardly find a match. In a trade, a
third group makes up for the difference, best one that both parts have anyway.

Example: part 0 has 4 rows of group A, whose others are in part 1. Part 1 has 3 rows of group B, whose others
are in part 0. A for B leaves part 1 with a row too many. Both parts have rows of group C: one of them goes to
part 0. A and B have a copy less each, and C as many as before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compiled import compiled, inner
from .costs import Costs, count_copies, count_samples, moving_cost, swap_and_count
from .parts import NONE, Parts, Task, bucket, fits_tokens, make_parts
from .search import MOST_TO_JOIN, MOST_TRIED

# Passes over all groups; each saves less than the one before.
PASSES = 3
# A group goes home if that saves no copy only where it has at least a part's rows ÷ this. Fewer rows find
# their way home one by one, and trying all of them takes long.
MOST_ROWS_TO_HOME = 32


class Stock(NamedTuple):
    """Groups that a part has and could give to another; a sample without others counts as one."""

    part: int
    to: int  # the part that would get them
    group: np.ndarray  # int64 [groups], NONE for a sample without others
    start: np.ndarray  # int64 [groups + 1], the first of each in `sample`
    copy_cost: np.ndarray  # int64 [groups]
    is_shared: np.ndarray  # bool [groups], whether the other part has samples of it, too
    thirds: np.ndarray  # int64 [thirds], groups that are tried as a third
    sample: np.ndarray  # int64 [samples], by group, first those that cost nothing to move
    work: np.ndarray  # int64 [samples + 1], sums over the samples before
    tokens: np.ndarray  # likewise
    cost: np.ndarray  # likewise, of moves


class Trade(NamedTuple):
    """Samples that change places with all of a group in part `source`."""

    cost: int  # negative if it saves any
    to: int  # the part that the group goes to; NONE for no trade
    back: int  # the group that comes back, a number in what `to` has; NONE for none
    third: int  # another one, a number in what its part has; NONE for none
    rows: int  # samples of the third
    source_gives: bool  # whether the third is given by `source`, not by `to`


@compiled
def trade(task: Task, part_of: np.ndarray, costs: Costs) -> None:
    """Changes `part_of` by trades that save costs and leave no part above the target load."""
    parts, copies = make_parts(task, part_of), costs.copies
    count_copies(copies, part_of)
    num_groups = len(copies.cost)
    by_group, ends = bucket(copies.group_of + 1, num_groups + 1)
    number = np.full(num_groups, NONE)
    for _ in range(PASSES):
        is_better = False
        for group in range(num_groups):
            members = by_group[ends[group] : ends[group + 1]]
            slot = copies.start[group]
            while slot < copies.start[group] + copies.used[group] and costs.looks[0] <= costs.looks[1]:
                source = copies.part[slot]
                found = _find_trade(parts, costs, members, source, number)
                if found.to == NONE:
                    slot += 1
                else:
                    is_better = True
                    _make(parts, costs, group, source, found, number)
        if not is_better:
            return


@inner
def _zeros(count: int) -> np.ndarray:
    return np.zeros(count, dtype=np.int64)


@inner
def _take_stock(parts: Parts, costs: Costs, part: int, to: int, number: np.ndarray) -> Stock:
    """Lists what `part` has, and could give to another; `number` `[groups]` is NONE before and after."""
    copies, first, rows = costs.copies, parts.start[part], parts.size[part]
    # 1. Number the groups in the order of their heaviest samples, in even numbers; odd are those samples of a
    # group that cost something to move.
    group_of, keys, count = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64), 0
    for at in range(rows):
        sample = parts.members[first + at]
        group = copies.group_of[sample]
        entry = count if group == NONE else number[group]
        if entry == NONE:
            entry = count
            number[group] = entry
        if entry == count:
            group_of[entry] = group
            count += 1
        keys[at] = 2 * entry + (moving_cost(costs, sample, part, to) > 0)
    order, ends = bucket(keys, 2 * count)
    start = _zeros(count + 1)
    for entry in range(count):
        start[entry + 1] = ends[2 * entry + 1]
    # 2. Look up what a copy costs, and which groups may be a third: those that both have, and some others.
    copy_cost, is_shared = _zeros(count), np.zeros(count, dtype=np.bool_)
    thirds, num_thirds = np.empty(count, dtype=np.int64), 0
    step = max(count // MOST_TRIED, 1)
    for entry in range(count):
        group = group_of[entry]
        if group != NONE:
            copy_cost[entry] = copies.cost[group]
            is_shared[entry] = count_samples(copies, group, to) > 0
            number[group] = NONE
        if is_shared[entry] or entry % step == 0:
            thirds[num_thirds] = entry
            num_thirds += 1
    # 3. Add the samples up.
    samples = np.empty(rows, dtype=np.int64)
    work, tokens, cost = _zeros(rows + 1), _zeros(rows + 1), _zeros(rows + 1)
    for at in range(rows):
        sample = samples[at] = parts.members[first + order[at]]
        work[at + 1] = work[at] + parts.work[sample]
        tokens[at + 1] = tokens[at] + parts.tokens[sample]
        cost[at + 1] = cost[at] + moving_cost(costs, sample, part, to)
    group_of, thirds = group_of[:count], thirds[:num_thirds]
    return Stock(part, to, group_of, start, copy_cost, is_shared, thirds, samples, work, tokens, cost)


@inner
def _giving_cost(stock: Stock, entry: int, rows: int) -> int:
    """The cost of giving so many samples of a group, the first ones."""
    start = stock.start[entry]
    copies = int(not stock.is_shared[entry]) - int(start + rows == stock.start[entry + 1])
    return stock.cost[start + rows] - stock.cost[start] + stock.copy_cost[entry] * copies


@inner
def _find_trade(parts: Parts, costs: Costs, members: np.ndarray, source: int, number: np.ndarray) -> Trade:
    """The cheapest trade of what `source` has of a group, to parts with others, or the home of one."""
    copies, group = costs.copies, costs.copies.group_of[members[0]]
    home = NONE
    for sample in members:
        if parts.part_of[sample] == source:
            home = costs.home[sample]
            break
    best = Trade(0, NONE, NONE, NONE, 0, False)
    joins = min(copies.used[group], MOST_TO_JOIN)
    for goal in range(joins + 1):
        # 1. Skip parts where the group would save nothing.
        joins_others = goal < joins
        to = copies.part[copies.start[group] + goal] if joins_others else home
        if to in (source, NONE) or (not joins_others and count_samples(copies, group, to) > 0):
            continue
        rows, cost = 0, -copies.cost[group] if joins_others else 0
        for sample in members:
            if parts.part_of[sample] == source:
                rows += 1
                cost += moving_cost(costs, sample, source, to)
        if cost >= 0 or (not joins_others and rows * MOST_ROWS_TO_HOME < parts.size[source]):
            continue
        # 2. See what either part has to even it out.
        costs.looks[0] += parts.size[source] + parts.size[to]
        gives = _take_stock(parts, costs, source, to, number)
        returns = _take_stock(parts, costs, to, source, number)
        best = _even_out(parts, costs, group, gives, returns, best)
    return best


@inner
def _even_out(parts: Parts, costs: Costs, group: int, gives: Stock, returns: Stock, best: Trade) -> Trade:
    """The cheapest trade of the group for what `returns` has, or `best` if none is cheaper."""
    source, to = gives.part, gives.to
    given = _find_entry(gives, group)
    first, end = gives.start[given], gives.start[given + 1]
    cost_of_given = _giving_cost(gives, given, end - first)
    for back in range(NONE, len(returns.group)):
        # 1. Add up what goes from the source for the group that comes back.
        if costs.looks[0] > costs.looks[1]:
            break
        costs.looks[0] += 1
        rows, load, cost = end - first, gives.work[end] - gives.work[first], cost_of_given
        amount = gives.tokens[end] - gives.tokens[first]
        if back != NONE:
            start, stop = returns.start[back], returns.start[back + 1]
            rows -= stop - start
            load -= returns.work[stop] - returns.work[start]
            amount -= returns.tokens[stop] - returns.tokens[start]
            cost += _giving_cost(returns, back, stop - start)
            if returns.group[back] == group:
                continue
        # 2. Rows and load that each part then has to give, or may get if negative. Of both, none can be had.
        rows_of_to = max(parts.size[to] + rows - parts.most, parts.fewest - parts.size[source] + rows)
        rows_of_source = max(parts.size[source] - rows - parts.most, parts.fewest - parts.size[to] - rows)
        load_of_to = parts.load[to] + load - parts.target
        load_of_source = parts.load[source] - load - parts.target
        to_gives, source_gives = max(rows_of_to, load_of_to) > 0, max(rows_of_source, load_of_source) > 0
        if to_gives == source_gives:
            if not to_gives and cost < best.cost and fits_tokens(parts, source, to, amount):
                best = Trade(cost, to, back, NONE, 0, False)
            continue
        # 3. Find a third group with as many samples as the one has to give, and the other may get.
        stock = returns if to_gives else gives
        least, lightest = (rows_of_to, load_of_to) if to_gives else (rows_of_source, load_of_source)
        most, heaviest = (-rows_of_source, -load_of_source) if to_gives else (-rows_of_to, -load_of_to)
        group_back = returns.group[back] if back != NONE else NONE
        for third in stock.thirds:
            count = _count_rows(stock, third, least, lightest)
            start = stock.start[third]
            work = stock.work[start + count] - stock.work[start]
            if count > most or work < lightest or work > heaviest or count < least:
                continue
            costs.looks[0] += 1
            total = cost + _giving_cost(stock, third, count)
            if total >= best.cost or stock.group[third] == group or (to_gives and third == back):
                continue
            if stock.group[third] != NONE and stock.group[third] == group_back:
                continue
            change = stock.tokens[start + count] - stock.tokens[start]
            if fits_tokens(parts, source, to, amount + (-change if to_gives else change)):
                best = Trade(total, to, back, third, count, source_gives)
    return best


@inner
def _count_rows(stock: Stock, entry: int, least: int, lightest: int) -> int:
    """Samples of a group to give that are at least so many, and so heavy; all if these are too few."""
    start, stop = stock.start[entry], stock.start[entry + 1]
    count, most = min(max(least, 1), stop - start), stop - start
    while count < most:
        middle = (count + most) // 2
        if stock.work[start + middle] - stock.work[start] < lightest:
            count = middle + 1
        else:
            most = middle
    return count


@inner
def _make(parts: Parts, costs: Costs, group: int, source: int, chosen: Trade, number: np.ndarray) -> None:
    """Makes the trade."""
    gives = _take_stock(parts, costs, source, chosen.to, number)
    returns = _take_stock(parts, costs, chosen.to, source, number)
    given = _find_entry(gives, group)
    _give(parts, costs, gives, given, gives.start[given + 1] - gives.start[given])
    if chosen.back != NONE:
        rows = returns.start[chosen.back + 1] - returns.start[chosen.back]
        _give(parts, costs, returns, chosen.back, rows)
    if chosen.third != NONE:
        _give(parts, costs, gives if chosen.source_gives else returns, chosen.third, chosen.rows)


@inner
def _find_entry(stock: Stock, group: int) -> int:
    """The place of a group that is there."""
    entry = 0
    while stock.group[entry] != group:
        entry += 1
    return entry


@inner
def _give(parts: Parts, costs: Costs, stock: Stock, entry: int, rows: int) -> None:
    for sample in stock.sample[stock.start[entry] : stock.start[entry] + rows]:
        swap_and_count(parts, costs.copies, stock.part, sample, stock.to, NONE)
