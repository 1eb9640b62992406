"""Compiled functions for samples that belong together, on the state of `partition.kernels`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...partition.compiled import compiled, inner
from ...partition.kernels import (
    LOOKS,
    NONE,
    ONE,
    ZERO,
    Limits,
    Lists,
    Samples,
    bucket,
    cost_of,
    make_lists,
    move,
    num_bits,
    sift,
    sorted_keys,
)

# A share of a group tries up to this many parts. Each pass over all groups saves less than the one before.
MOST_TO_JOIN, REUNITE_PASSES = 4, 4
# In a larger part, a share meets one other part. Two parts compare up to this many pairs of runs per row.
MANY_ROWS, LOOKS_PER_ROW = 256, 16


class Groups(NamedTuple):
    """Groups of samples that belong together; all arrays are int64."""

    of: np.ndarray  # [samples], group of each sample; a single sample is a group, too
    copy: np.ndarray  # [groups], cost of each part of a group beyond the first; 0 for a single sample


class Runs(NamedTuple):
    """Runs that a part may give to another. A run has the first samples of a group. The last run is empty.

    Run i ends with the i-th sample. All arrays except `sample` are int64 `[samples + 1]`.
    """

    sample: np.ndarray  # [samples], by group; in a group, samples with free moves come first
    begin: np.ndarray  # index where each run begins
    group: np.ndarray  # NONE for the empty run
    work: np.ndarray
    other: np.ndarray
    cost: np.ndarray  # cost of moves and copies
    by_cost: np.ndarray  # runs, the cheapest first


@inner
def _list_runs(
    samples: Samples, limits: Limits, groups: Groups, lists: Lists, part: int, to: int, number: np.ndarray
) -> Runs:
    """Lists the runs that `part` may give to part `to`, and the cost of each.

    `number`, int64 `[groups]`, is work space. It is all 0 before and after the call.

    Example: a part has samples 3 and 5 of a group that no other part has. A copy costs 64, and a move 1, but
    sample 3 is away from home already. Run [3] costs 64 for a copy, and [3, 5] costs 1 to move sample 5.
    """
    home, price, node_of = samples.home, samples.price, limits.node_of
    members, first, count = lists.members, lists.start[part], lists.size[part]
    # 1. Number groups from 1, by their heaviest samples. Samples with a cost to move have odd keys.
    keys, num_groups = np.empty(count, dtype=np.int64), ZERO
    for at in range(count):
        sample = members[first + at]
        group = groups.of[sample]
        if number[group] == 0:
            num_groups += 1
            number[group] = num_groups
        keys[at] = 2 * number[group] + (cost_of(home, price, node_of, sample, part, to) > 0)
    order, ends = bucket(keys, 2 * num_groups + 2)
    is_in_both = np.zeros(num_groups + 1, dtype=np.int64)
    for at in range(lists.start[to], lists.start[to] + lists.size[to]):
        is_in_both[number[groups.of[members[at]]]] = 1  # a group that only `to` has counts as group 0
    # 2. Add up the samples of each group, run by run.
    taken, begin = np.empty(count, dtype=np.int64), np.empty(count + 1, dtype=np.int64)
    group_of, work = np.empty(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    other, cost = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    bits = num_bits(count + 1)
    keys = np.empty(count + 1, dtype=np.int64)
    for group_at in range(1, num_groups + 1):
        start, end = ends[2 * group_at - 1], ends[2 * group_at + 1]
        group = groups.of[members[first + order[start]]]
        works, others, costs = ZERO, ZERO, ZERO
        if is_in_both[group_at] == 0:
            costs += groups.copy[group]
        for at in range(start, end):
            sample = members[first + order[at]]
            works += samples.work[sample]
            others += samples.other[sample]
            costs += cost_of(home, price, node_of, sample, part, to)
            taken[at], begin[at], group_of[at], work[at], other[at] = sample, start, group, works, others
            cost[at] = costs - (groups.copy[group] if at + 1 == end else 0)
            keys[at] = (cost[at] << bits) | at
        number[group] = 0
    begin[count], group_of[count], keys[count] = count + 1, NONE, count
    by_cost = sorted_keys(keys)
    for at in range(count + 1):
        by_cost[at] &= (ONE << bits) - 1
    return Runs(taken, begin, group_of, work, other, cost, by_cost)


@inner
def _find_exchange(
    limits: Limits, lists: Lists, part: int, gives: Runs, to: int, returns: Runs
) -> tuple[int, int]:
    """Returns the exchange that saves the most: (run that `part` gives, run that comes back).

    It keeps to the limits of both parts. Both runs are NONE if no exchange saves cost.

    Example: part 0 may give [a a a a] of work 40, and part 1 [b b b b] of 32 or [c c c] of 36. Each run saves
    a copy of 64, and costs 1 per move. With equal rows, and 5 to 10 to take off, a goes for b, saving 120.
    """
    size = lists.size
    least, most = lists.load[part] - limits.load[part], limits.load[to] - lists.load[to]
    net_least = max(size[part] - limits.most, limits.fewest - size[to])  # rows that leave the part, net
    net_most = min(size[part] - limits.fewest, limits.most - size[to])
    cheapest = returns.cost[returns.by_cost[0]]
    best, chosen, chosen_back, looks = ZERO, NONE, NONE, LOOKS_PER_ROW * (len(gives.cost) + len(returns.cost))
    for give in gives.by_cost:
        if gives.cost[give] + cheapest >= best or looks < 0:
            break
        rows, work = give - gives.begin[give] + 1, gives.work[give]
        if rows == 0 or work < least:
            continue
        for back in returns.by_cost:
            cost = gives.cost[give] + returns.cost[back]
            if cost >= best:
                break
            looks -= 1
            change = work - returns.work[back]
            if change < least or change > most or gives.group[give] == returns.group[back]:
                continue
            if not net_least <= rows - (back - returns.begin[back] + 1) <= net_most:
                continue
            change = gives.other[give] - returns.other[back]
            if change > 0 and lists.amount[to] + change > limits.other[to]:
                continue
            if change < 0 and lists.amount[part] - change > limits.other[part]:
                continue
            best, chosen, chosen_back = cost, give, back
            break
    return chosen, chosen_back


@compiled
def place_units(
    samples: Samples,
    limits: Limits,
    most_load: np.ndarray,
    part_of: np.ndarray,
    by_unit: np.ndarray,
    ends: np.ndarray,
    order: np.ndarray,
) -> None:
    """Places units of samples in `order`: at home if there is room, else in the part with the most room.

    1. A unit goes to the home where most of it stays, among those with room for all of it within the limits.
    2. Otherwise it goes to the part with the most room, if it fits up to `most_load`, which may exceed the
       limit. If it does not fit there, it goes to the emptiest part where it fits.
    3. Otherwise, the part that can take the most samples of the unit takes them, at least one. The rest is
       placed the same way.

    Example: two parts have 4 rows and loads up to 20. Units of 4, 2, and 2 samples, each with 4 of work, are
    all at home in part 0. The first unit stays there, and the others go to part 1.
    """
    home, other, num_parts = samples.home, samples.other, len(limits.load)
    load, amount = np.zeros(num_parts, dtype=np.int64), np.zeros(num_parts, dtype=np.int64)
    size, at_home = np.zeros(num_parts, dtype=np.int64), np.zeros(num_parts, dtype=np.int64)
    bits = num_bits(num_parts)
    mask = (ONE << bits) - 1
    heap, at_of, end = np.empty(num_parts, dtype=np.int64), np.empty(num_parts, dtype=np.int64), num_parts
    for part in range(num_parts):
        sift(heap, at_of, mask, part, part, (-limits.load[part] << bits) | part)
    sums, others = np.zeros(len(by_unit) + 1, dtype=np.int64), np.zeros(len(by_unit) + 1, dtype=np.int64)
    for unit in order:
        first, last = ends[unit - 1] if unit > 0 else 0, ends[unit]
        while first < last:
            rows, chosen, count = last - first, NONE, last - first
            for at in range(rows):
                sample = by_unit[first + at]
                sums[at + 1], others[at + 1] = sums[at] + samples.work[sample], others[at] + other[sample]
                at_home[home[sample]] += samples.price[sample]
            for at in range(first, last):
                part = home[by_unit[at]]
                fits = size[part] + rows <= limits.most and load[part] + sums[rows] <= limits.load[part]
                if fits and amount[part] + others[rows] <= limits.other[part]:
                    stays = 0 if chosen == NONE else at_home[part] - at_home[chosen]
                    if chosen == NONE or stays > 0 or (stays == 0 and load[part] < load[chosen]):
                        chosen = part
            for at in range(first, last):
                at_home[home[by_unit[at]]] = 0
            if chosen == NONE:
                count = ZERO
                for at in range(NONE, end):  # first try the top of the heap, which likely fits all
                    part = heap[max(at, 0)] & mask
                    fitting, most = ZERO, min(rows, limits.most - size[part])
                    room, other_room = most_load[part] - load[part], limits.other[part] - amount[part]
                    while fitting < most and sums[fitting + 1] <= room and others[fitting + 1] <= other_room:
                        fitting += 1
                    is_emptier = fitting == count and heap[at] < heap[at_of[chosen]]
                    if chosen == NONE or fitting > count or is_emptier:
                        chosen, count = part, fitting
                    if at == NONE and fitting == rows:
                        break
                count = max(count, 1)
            for at in range(first, first + count):
                part_of[by_unit[at]] = chosen
            load[chosen] += sums[count]
            amount[chosen] += others[count]
            size[chosen] += count
            first += count
            if size[chosen] == limits.most:  # a full part leaves the heap
                end -= 1
                if at_of[chosen] < end:
                    sift(heap, at_of, mask, at_of[chosen], end, heap[end])
            else:
                key = ((load[chosen] - limits.load[chosen]) << bits) | chosen
                sift(heap, at_of, mask, at_of[chosen], end, key)


@compiled
def reunite(samples: Samples, limits: Limits, groups: Groups, part_of: np.ndarray) -> None:
    """Makes exchanges between parts that share a group, if they save costs and keep to the limits.

    1. The parts that have samples of a group are sorted, those with the most samples of it first.
    2. From the last on, each part meets some parts before it, except parts that likely have only this group.
       The two make the cheapest exchange of runs of any groups, if it saves costs.
    3. Parts that have not changed since they met for the same group do not meet again.

    Example: with equal rows, part 0 has [a a a b], part 1 [a b b b], all of the same work. A copy costs 64.
    They meet for a: part 1 gives its a for the b of part 0, which saves two copies at the cost of two moves.
    """
    num_parts = len(limits.load)
    lists = make_lists(samples, part_of, num_parts)
    members, start, size, number = lists.members, lists.start, lists.size, np.zeros_like(groups.copy)
    by_group, ends = bucket(groups.of, len(groups.copy))
    rows, parts = np.zeros(num_parts, dtype=np.int64), np.empty(num_parts, dtype=np.int64)
    changed, tried_at = np.ones(num_parts, dtype=np.int64), np.zeros(len(groups.copy), dtype=np.int64)
    clock, looks = ONE, LOOKS * len(part_of)
    for _ in range(REUNITE_PASSES):
        before = clock
        for group in range(len(groups.copy)):
            count = ZERO
            for at in range(ends[group - 1] if group > 0 else 0, ends[group]):
                part = part_of[by_group[at]]
                if rows[part] == 0:
                    parts[count] = part
                    count += 1
                rows[part] += 1
            for at in range(count):
                part = parts[at]
                parts[at] -= rows[part] * num_parts
                rows[part] = 0
            if count == 1:
                continue
            ordered = sorted_keys(parts[:count])
            for at in range(count):
                ordered[at] %= num_parts
            last_try, tried_at[group] = tried_at[group], clock
            for at in range(count - 1, 0, -1):
                part, tried = ordered[at], ZERO
                for before_at in range(at):
                    to = ordered[before_at]
                    if tried == MOST_TO_JOIN or (tried > 0 and size[part] > MANY_ROWS):
                        break
                    first, last = members[start[to]], members[start[to] + size[to] - 1]
                    if groups.of[first] == group and groups.of[last] == group:
                        continue  # the part likely has nothing else
                    tried += 1
                    if max(changed[part], changed[to]) <= last_try or looks < 0:
                        continue
                    looks -= 2 * LOOKS_PER_ROW * (size[part] + size[to])  # to list runs, and to compare them
                    may_give = _list_runs(samples, limits, groups, lists, part, to, number)
                    may_return = _list_runs(samples, limits, groups, lists, to, part, number)
                    give, back = _find_exchange(limits, lists, part, may_give, to, may_return)
                    if give != NONE:
                        gives, returns = may_give.begin[give], may_return.begin[back]
                        while gives <= give or returns <= back:  # alternately, so that sizes stay close
                            if gives <= give:
                                move(samples, lists, part_of, may_give.sample[gives], to)
                            if returns <= back:
                                move(samples, lists, part_of, may_return.sample[returns], part)
                            gives, returns = gives + 1, returns + 1
                        clock += 1
                        changed[part], changed[to] = clock, clock
        if clock == before:
            break
