"""All compiled functions: one state, the parts with their samples, and the operations that change it.

Samples are numbered from the heaviest down, so that comparing two numbers compares work and breaks ties. Work
is int64: sums are exact in any order. Workloads are at least 1, so that samples that cost nothing spread like
others; tokens in their place may be 0. Keys of heaps and sorts are `value << bits | index`, one comparison
each.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from .compiled import compiled, inner

# To numba a literal is a type of its own. It compiles a function anew for each as an argument, and infers all
# types of a function anew where a variable begins as one. So variables begin as these; NONE is in place of a
# sample or a part.
NONE, ZERO, ONE = cast(tuple[int, int, int], tuple(np.arange(-1, 2)))
NO_CAP = 2**62
# The steps of `settle`.
SWAPS, LEAVES, DEALS = cast(tuple[int, int, int], tuple(np.arange(3)))
# Arguments of `settle` for all of them; and for none, so that samples only return home.
ALL, ONLY_RETURN = (False, 1, NO_CAP), (True, 1, 0)
# A byte to another node costs as much as this many bytes within one: nodes are left last.
ACROSS_NODES = 1000
# Leveling looks for partners among few of the emptiest parts, then among many, then among some of all: giants
# next to the lightest samples are as full as others, and all that those can swap with. Without the last, the
# slowest default plans in "plans at size", lognormal, 1,024 ranks, take 21 ms, not 9. No literals, like ZERO.
FEW_PARTNERS, MANY_PARTNERS, FROM_ALL = cast(tuple[int, int, int], tuple(np.array([7, 63, 64])))
# Halvings of what a swap has to take off a part; fewer inside a node, after which all parts follow, and where
# moves cost nothing, because the next target will do. With ten, the slowest default plans in "plans at size",
# lognormal, 64 ranks, take more than three times as long as the median.
HALVINGS, FEW_HALVINGS = 7, 2
# A part that came above its limit so often passes nothing on to one that is then above its own. Parts
# that pass on what others passed to them may do so for long, as where samples are sorted over them by work.
MOST_VISITS = 3
# Samples tried in return for one, where the lightest would break the limit of the other measure.
TRIES = 4
# Loads below this share of all limits leave room. Samples next to a giant then leave at once, which is faster
# than swaps. Nearer to the limits, twice as many samples would move.
MUCH_ROOM = 0.9
# Leveling looks at so many samples in all, for each that there is. Searches that end too soon cost more time.
LOOKS = 2048
# Runs of a merge sort that insertion sorts.
SHORT_RUN = 16
# Parts that a part's share of a group may join. Passes over all groups; each saves less than the one before.
MOST_TO_JOIN, REUNITE_PASSES = 4, 4
# With more rows than this, a share meets one other. Pairs of runs looked at, for each row of two parts.
MANY_ROWS, LOOKS_PER_ROW = 256, 16
# A share of a limit counts up to 2**10, with 32 binary digits after the point.
_SHARE, _MOST_SHARE = 2.0**32, 2.0**10


class Samples(NamedTuple):
    """Samples from the heaviest to the lightest; all arrays are int64 `[samples]`."""

    work: np.ndarray
    other: np.ndarray  # a second measure, which has limits of its own; zeros without one
    home: np.ndarray  # the part that each is in at first; NONE for none
    price: np.ndarray  # of leaving home; ACROSS_NODES times as much to another node


class Limits(NamedTuple):
    """Limits of parts; arrays are int64 `[parts]`."""

    load: np.ndarray  # sum of work, at least 1
    other: np.ndarray  # sum of the second measure
    node_of: np.ndarray  # ascending; each part a node of its own, or one node of all, without nodes
    per_node: int  # parts of a node
    fewest: int  # samples of a part
    most: int


class Lists(NamedTuple):
    """The samples of every part, and their sums; all arrays are int64."""

    members: np.ndarray  # the samples of part p, ascending, from start[p] on; room for more follows them
    start: np.ndarray  # [parts + 1]
    size: np.ndarray  # [parts], samples
    load: np.ndarray  # [parts], work
    amount: np.ndarray  # [parts], the second measure


@compiled
def sum_per_part(values: np.ndarray, part_of: np.ndarray, num_parts: int) -> np.ndarray:
    """Adds int64 `[samples]` up to int64 `[parts]`, without samples whose part is NONE."""
    sums = np.zeros(num_parts, dtype=np.int64)
    for sample in range(len(values)):
        if part_of[sample] != NONE:
            sums[part_of[sample]] += values[sample]
    return sums


@compiled
def bucket(numbers: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorts the indices of int64 `numbers` by number, stably, and tells where each of `count` numbers ends.

    Example: parts [1, 0, 1, 2] of four samples become samples [1, 0, 2, 3], which end at [1, 3, 4].
    """
    ends = np.zeros(count + 1, dtype=np.int64)
    for number in numbers:
        ends[number + 1] += 1
    for number in range(count):
        ends[number + 1] += ends[number]
    indices = np.empty(len(numbers), dtype=np.int64)
    for index in range(len(numbers)):  # `ends` grow from where numbers start to where they end
        number = numbers[index]
        indices[ends[number]] = index
        ends[number] += 1
    return indices, ends[:count]


@inner
def _bits(count: int) -> int:
    """Binary digits of a number below `count`, at least 1."""
    bits = ONE
    while count > 1 << bits:
        bits += 1
    return bits


@inner
def _sorted(keys: np.ndarray) -> np.ndarray:
    """Sorts int64 `[keys]`, none of which are equal; it compiles faster than NumPy's."""
    count = len(keys)
    found, spare = keys.copy(), np.empty(count, dtype=np.int64)
    for i in range(count):  # short runs by insertion
        key, j = found[i], i
        while j % SHORT_RUN > 0 and found[j - 1] > key:
            found[j] = found[j - 1]
            j -= 1
        found[j] = key
    width = ZERO + SHORT_RUN
    while width < count:  # and then merges of two runs
        for start in range(0, count, 2 * width):
            left, right = start, min(start + width, count)
            middle, end = right, min(start + 2 * width, count)
            for at in range(start, end):
                if right == end or (left < middle and found[left] < found[right]):
                    spare[at] = found[left]
                    left += 1
                else:
                    spare[at] = found[right]
                    right += 1
        found, spare = spare, found
        width *= 2
    return found


@inner
def _sift(heap: np.ndarray, at_of: np.ndarray, mask: int, at: int, end: int, key: int) -> None:
    """Puts a key where it belongs in heap[:end], from position `at` on; `at_of` follows."""
    while at > 0 and key < heap[(at - 1) // 2]:
        heap[at] = heap[(at - 1) // 2]
        at_of[heap[at] & mask] = at
        at = (at - 1) // 2
    while 2 * at + 1 < end:
        child = 2 * at + 1
        if child + 1 < end:
            child += heap[child + 1] < heap[child]
        if heap[child] >= key:
            break
        heap[at] = heap[child]
        at_of[heap[at] & mask] = at
        at = child
    heap[at] = key
    at_of[key & mask] = at


@compiled
def place(samples: Samples, limits: Limits, part_of: np.ndarray, near_home: bool) -> bool:
    """Gives every sample without a part one, the heaviest first; returns whether all have one then.

    1. The parts that can take more are in a heap, the one with most room below its limit on top.
    2. With `near_home`, a sample goes home if that is within the limits; else to the part with most room in
       its own node, if that is.
    3. Else it goes to the part with most room, among those that keep their limit of the other measure.

    Example: work [8, 7, 6, 5, 4] on two empty parts goes to parts [0, 1, 1, 0, 0], with loads of 17 and 13.
    """
    work, other, home, node_of = samples.work, samples.other, samples.home, limits.node_of
    num_parts, num_samples = len(limits.load), len(work)
    load, amount = sum_per_part(work, part_of, num_parts), sum_per_part(other, part_of, num_parts)
    size = np.zeros(num_parts, dtype=np.int64)
    for part in part_of:
        if part != NONE:
            size[part] += 1
    spare = num_samples - num_parts * limits.fewest  # samples that no part needs to have its fewest
    bits = _bits(num_parts)
    mask = (ONE << bits) - 1
    keys, heap = np.empty(num_parts, dtype=np.int64), np.empty(num_parts, dtype=np.int64)
    at_of, end = np.empty(num_parts, dtype=np.int64), num_parts
    for part in range(num_parts):
        spare -= max(size[part] - limits.fewest, 0)
        keys[part] = ((load[part] - limits.load[part]) << bits) | part
        _sift(heap, at_of, mask, part, part, keys[part])
    num_left = ZERO
    for sample in range(num_samples):
        if part_of[sample] != NONE:
            continue
        most = limits.most if spare > 0 else limits.fewest
        chosen, needed = NONE, other[sample]
        if near_home:
            own, below = home[sample], (1 - work[sample]) << bits  # keys of parts that stay within limits
            first = node_of[own] * limits.per_node
            for at in range(first - 1, min(first + limits.per_node, num_parts)):  # home first
                part = own if at < first else at
                if keys[part] < below and size[part] < most and amount[part] + needed <= limits.other[part]:
                    chosen, below = part, keys[part]
                    if part == own:
                        break
        while chosen == NONE and end > 0:
            part = heap[0] & mask
            if size[part] < most:
                chosen = part
            else:  # a part with all its samples leaves the heap
                end -= 1
                _sift(heap, at_of, mask, ZERO, end, heap[end])
        if chosen != NONE and amount[chosen] + needed > limits.other[chosen]:
            chosen = NONE
            for part in range(num_parts):
                fits = size[part] < most and amount[part] + needed <= limits.other[part]
                if fits and (chosen == NONE or keys[part] < keys[chosen]):
                    chosen = part
        if chosen == NONE:
            num_left += 1
            continue
        spare -= size[chosen] >= limits.fewest
        part_of[sample] = chosen
        size[chosen] += 1
        amount[chosen] += needed
        keys[chosen] += work[sample] << bits
        _sift(heap, at_of, mask, at_of[chosen], end, keys[chosen])
    return num_left == 0


@inner
def _make_lists(samples: Samples, part_of: np.ndarray, num_parts: int) -> Lists:
    """Lists the samples of parts; those without a part are left out."""
    lists = Lists(
        np.empty(2 * len(part_of) + 4 * num_parts, dtype=np.int64),
        np.zeros(num_parts + 1, dtype=np.int64),
        np.empty(num_parts, dtype=np.int64),
        np.empty(num_parts, dtype=np.int64),
        np.empty(num_parts, dtype=np.int64),
    )
    _list_again(samples, lists, part_of)
    return lists


@inner
def _list_again(samples: Samples, lists: Lists, part_of: np.ndarray) -> None:
    """Writes what `_make_lists` returns into lists that are there: large arrays take time to allocate.

    There is room for every part to double.
    """
    load, amount, size, start, members = lists.load, lists.amount, lists.size, lists.start, lists.members
    for part in range(len(size)):
        load[part], amount[part], size[part] = 0, 0, 0
    for sample in range(len(part_of)):
        part = part_of[sample]
        if part != NONE:
            load[part] += samples.work[sample]
            amount[part] += samples.other[sample]
            size[part] += 1
    for part in range(len(size)):
        start[part + 1] = start[part] + 2 * size[part] + 4
        size[part] = 0
    for sample in range(len(part_of)):
        part = part_of[sample]
        if part != NONE:
            members[start[part] + size[part]] = sample
            size[part] += 1


@inner
def _move(samples: Samples, lists: Lists, part_of: np.ndarray, sample: int, to: int) -> None:
    """Moves a sample to another part; does nothing for NONE."""
    if sample == NONE:
        return
    members, start, size, source = lists.members, lists.start, lists.size, part_of[sample]
    if start[to] + size[to] == start[to + 1]:
        _list_again(samples, lists, part_of)
    # 1. Take it out, and close the gap.
    at, last = start[source], start[source] + size[source] - 1
    while members[at] != sample:
        at += 1
    while at < last:
        members[at] = members[at + 1]
        at += 1
    # 2. Insert it, in ascending order.
    at = start[to] + size[to]
    while at > start[to] and members[at - 1] > sample:
        members[at] = members[at - 1]
        at -= 1
    members[at] = sample
    # 3. Update the sums.
    part_of[sample] = to
    size[source] -= 1
    size[to] += 1
    lists.load[source] -= samples.work[sample]
    lists.load[to] += samples.work[sample]
    lists.amount[source] -= samples.other[sample]
    lists.amount[to] += samples.other[sample]


@inner
def _away(home: np.ndarray, price: np.ndarray, node_of: np.ndarray, sample: int, part: int) -> int:
    """The cost of having a sample in a part."""
    own = home[sample]
    if own != part and own != NONE:
        return price[sample] * (1 if node_of[own] == node_of[part] else ACROSS_NODES)
    return ZERO


@inner
def _cost(home: np.ndarray, price: np.ndarray, node_of: np.ndarray, sample: int, part: int, to: int) -> int:
    """The cost of moving a sample from a part to another, below 0 where it comes nearer to its home."""
    return _away(home, price, node_of, sample, to) - _away(home, price, node_of, sample, part)


@inner
def _evict(
    samples: Samples, limits: Limits, part_of: np.ndarray, lists: Lists, only_surplus: bool, has_room: bool
) -> bool:
    """Takes out what has to go, by writing NONE to its `part_of`; returns whether anything goes.

    1. Surplus samples of a part: the lightest, and as many of the heaviest as the limit of its load demands.
    2. Of parts above their limit, the heaviest samples that another part has room for. With `only_surplus`,
       swaps will do that; but where there is room elsewhere, not for what is next to a giant that must stay.
    3. In return, the lightest samples of the same node, which come to where they weigh least: up to a quarter
       of what each part has. What is missing then comes from all nodes.

    Example: the limit is 100, and parts of 4 rows have [97, 5, 4, 3] and [40, 30, 2, 1]. The giant of 97
    stays, and 5, 4 and 3 leave. A quarter of the other part leaves in return, its 1.
    """
    work, members, start, size, load = samples.work, lists.members, lists.start, lists.size, lists.load
    num_parts, has_nodes = len(limits.load), limits.per_node > 1
    room = ZERO
    for part in range(num_parts):
        room = max(room, limits.load[part] - load[part])
    spare = len(work) - num_parts * limits.fewest
    wanted = np.zeros(num_parts, dtype=np.int64)  # samples in return, by node
    num_out, num_wanted = ZERO, ZERO
    for part in range(num_parts):
        first, count, over = start[part], size[part], load[part] - limits.load[part]
        kept = min(max(count - limits.fewest, 0), limits.most - limits.fewest, spare)
        spare -= kept
        surplus = max(count - limits.fewest - kept, 0)
        # The lightest of all that no part before this one gets in return.
        lightest = work[max(len(work) - 1 - num_wanted, 0)] if limits.fewest > 0 and count > 0 else 0
        relief, skipped, changes = ZERO, ZERO, ZERO
        for at in range(surplus):
            relief += work[members[first + count - 1 - at]]
        while relief < over and skipped + changes < count:
            heaviest = work[members[first + skipped + changes]]
            if changes == 0 and limits.fewest > 0 and heaviest - lightest > room:
                skipped += 1
                continue
            # Instead of one of the lightest, or for another sample as light.
            relief += heaviest - (
                work[members[first + count - surplus + changes]] if changes < surplus else lightest
            )
            changes += 1
        skipped = min(skipped, count - surplus)
        if only_surplus and not (has_room and skipped > 0):
            changes = min(changes, surplus)
        light = max(surplus - changes, 0)
        for at in range(changes):
            part_of[members[first + skipped + at]] = NONE
        for at in range(light):
            part_of[members[first + count - 1 - at]] = NONE
        num_out += changes + light
        wanted[limits.node_of[part] if has_nodes else 0] += max(changes - surplus, 0)
        num_wanted += max(changes - surplus, 0)
    if num_out == 0 or limits.fewest == 0:
        return num_out > 0
    back = np.zeros(num_parts, dtype=np.int64)
    for by_node in range(int(has_nodes), -1, -1):
        for node in range(1, 0 if by_node else num_parts):
            wanted[0] += wanted[node]
        for sample in range(len(part_of) - 1, -1, -1):
            part = part_of[sample]
            if part == NONE:
                continue
            node = by_node * limits.node_of[part]
            if wanted[node] > 0 and load[part] < limits.load[part] and back[part] < limits.fewest // 4:
                back[part] += 1
                wanted[node] -= 1
                part_of[sample] = NONE
    return True


@inner
def _fullness(limits: Limits, lists: Lists, part: int) -> int:
    """The larger share that a part has of its limits, times 2**32."""
    share = max(lists.load[part] / limits.load[part], lists.amount[part] / max(limits.other[part], 1))
    return int(min(share, _MOST_SHARE) * _SHARE)


@inner
def _find_swap(
    samples: Samples, limits: Limits, lists: Lists, full: int, partners: np.ndarray, least: int, beyond: int
) -> tuple[int, int, int]:
    """The cheapest swap: (sample of part `full`, part that takes it, sample that comes back).

    It takes at least `least` off part `full`, and leaves the partner at most `beyond` above its limit. Where
    all swaps cost the same, the first one found will do. All are NONE without a swap, and the last is NONE
    where nothing comes back.

    Two pointers over the samples of both parts find the lightest that may come back for each one given.
    """
    work, other, home, price = samples.work, samples.other, samples.home, samples.price
    members, start, size, amount = lists.members, lists.start, lists.size, lists.amount
    node_of = limits.node_of
    gives, taker, returns, best, is_free = NONE, NONE, NONE, ZERO + NO_CAP, len(price) > 0 and price[0] == 0
    for to in partners:
        most = limits.load[to] - lists.load[to] + beyond
        if is_free and taker != NONE:
            break
        if to == full or most < least:
            continue
        may_give = size[full] > limits.fewest and size[to] < limits.most
        begin, stop = start[to], start[to] + size[to]
        lightest = ZERO if may_give or begin == stop else work[members[stop - 1]]
        pointer = begin  # behind the lightest sample that may come back
        for at in range(start[full], start[full] + size[full]):
            sample = members[at]
            if work[sample] - lightest < least:
                break
            while pointer < stop and work[sample] - work[members[pointer]] <= most:
                pointer += 1
            returned = NONE
            for back in range(pointer - 1, max(pointer - 1 - TRIES, begin - 1), -1):
                other_sample = members[back]
                if work[sample] - work[other_sample] < least:
                    break
                change = other[sample] - other[other_sample]
                keeps = change <= 0 or amount[to] + change <= limits.other[to]
                if keeps and (change >= 0 or amount[full] - change <= limits.other[full]):
                    returned = other_sample
                    break
            goes_alone = may_give and work[sample] <= most and amount[to] + other[sample] <= limits.other[to]
            if returned == NONE and not goes_alone:
                continue  # as for most samples, before looking up what they cost
            cost = _cost(home, price, node_of, sample, full, to)
            if goes_alone and cost < best:
                gives, taker, returns, best = sample, to, NONE, cost
            if returned != NONE:
                cost += _cost(home, price, node_of, returned, to, full)
                if cost < best:
                    gives, taker, returns, best = sample, to, returned, cost
    return gives, taker, returns


@inner
def _level(
    samples: Samples,
    limits: Limits,
    part_of: np.ndarray,
    lists: Lists,
    first: int,
    end: int,
    most_stuck: int,
    most_moved: int,
    most_partners: int,
) -> tuple[int, int]:
    """Takes what is above the limit off parts from `first` to `end`.

    Returns how many are stuck above it, and how many more samples may leave their home.

    1. The fullest part comes first. Its partners are near the top of a heap with the emptiest part on top; of
       the shares that it has of its limits, the larger one tells how full a part is. Where few do not help,
       more are tried, up to `most_partners`.
    2. Of all swaps that take the excess off at once, it takes the cheapest; else of those that take half of
       it, a quarter, and so on. A partner may then end above its limit, by 3/4 of that, and follows later.

    It stops when `most_stuck` are, or more than `most_moved` samples have left their home.

    Example: the limit is 80, a part has 95, and its partner 70. A sample of 25 for one of 15 takes 10 off the
    excess of 15, all that the partner has room for. So the swap takes at least half of it, 7, and may take
    up to 10 + 6: a sample of 25 for one of 10 settles it, and leaves the partner 5 above the limit.
    """
    work, home, price, size, load = samples.work, samples.home, samples.price, lists.size, lists.load
    count, bits, looks = end - first, _bits(end - first), LOOKS * len(work)
    mask = (ONE << bits) - 1
    keys = np.empty(count, dtype=np.int64)  # parts count from `first` in them
    for at in range(count):
        keys[at] = (_fullness(limits, lists, first + at) << bits) | at
    heap, at_of = _sorted(keys), np.empty(count, dtype=np.int64)
    queue, read, write = np.empty(count + 1, dtype=np.int64), ZERO, ZERO
    tried = np.empty(min(MANY_PARTNERS, count), dtype=np.int64)
    visits, is_queued = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for at in range(count - 1, -1, -1):
        number = heap[at] & mask
        at_of[number] = at
        if load[first + number] > limits.load[first + number]:
            queue[write], is_queued[number] = first + number, 1
            write += 1
    num_stuck, is_free = ZERO, len(price) > 0 and price[0] == 0  # any swap is as cheap as others
    halvings = HALVINGS if count == len(limits.load) and not is_free else FEW_HALVINGS
    while read != write and num_stuck < most_stuck:
        full = queue[read]
        read, is_queued[full - first] = (read + 1) % len(queue), 0
        halving, num_partners = ZERO, min(most_partners, MANY_PARTNERS if is_free else FEW_PARTNERS)
        while load[full] > limits.load[full]:
            gives, taker, returns = NONE, NONE, NONE
            halving = max(halving - 1, 0)  # what did not help before will hardly do now
            while taker == NONE and looks > 0:
                least = max((load[full] - limits.load[full]) >> halving, 1)
                beyond = least - least // 4 if halving > 0 and visits[full - first] < MOST_VISITS else 0
                stride = -(-count // MANY_PARTNERS) if num_partners == FROM_ALL else ONE
                num_tried = min(num_partners, -(-count // stride))
                looks -= 2 * num_tried * size[full]
                for at in range(num_tried):
                    tried[at] = first + (heap[at * stride] & mask)
                gives, taker, returns = _find_swap(
                    samples, limits, lists, full, tried[:num_tried], least, beyond
                )
                if taker == NONE:
                    halving += 1
                    if halving > halvings:
                        if num_partners == most_partners or num_tried >= count - 1:
                            break
                        more = MANY_PARTNERS if num_partners == FEW_PARTNERS else FROM_ALL
                        halving, num_partners = ZERO, min(most_partners, more)
            if taker != NONE and home[gives] != NONE:
                most_moved -= int(taker != home[gives]) - int(full != home[gives])
                if returns != NONE:
                    most_moved -= int(full != home[returns]) - int(taker != home[returns])
            if taker == NONE or most_moved < 0:
                num_stuck += 1 if most_moved >= 0 else most_stuck
                break
            _move(samples, lists, part_of, gives, taker)
            _move(samples, lists, part_of, returns, full)
            for part in (full, taker):
                key = (_fullness(limits, lists, part) << bits) | (part - first)
                _sift(heap, at_of, mask, at_of[part - first], count, key)
            if load[taker] > limits.load[taker] and is_queued[taker - first] == 0:
                queue[write], is_queued[taker - first] = taker, 1
                write = (write + 1) % len(queue)
                visits[taker - first] += 1
    return num_stuck, most_moved


@inner
def _send_home(
    samples: Samples,
    limits: Limits,
    part_of: np.ndarray,
    lists: Lists,
    kept: np.ndarray,
    most_moved: int,
    attempts: int,
) -> None:
    """Returns samples to their home, or node, alone or in a swap, where that costs less within the limits.

    Those in the part that `kept` has of them stay there. What is in another node may also go to the part of
    its home's node with most room. With two attempts, it may go to any part there, for more samples in
    return, and is tried again once all have been: with little room, that sends fewer bytes across nodes.

    What comes back has at least the work for which there is no room, and at most what leaves room behind. At
    most `most_moved` more samples leave home, for others that so come into their nodes.
    """
    work, other, home, price = samples.work, samples.other, samples.home, samples.price
    members, start, size, load, amount = lists.members, lists.start, lists.size, lists.load, lists.amount
    node_of = limits.node_of
    for number in range(attempts * len(part_of)):
        sample = number % len(part_of)
        part, own = part_of[sample], home[sample]
        may_return = part != own and part != kept[sample] and part != NONE and own != NONE
        is_far = may_return and node_of[part] != node_of[own]
        if not may_return or (number >= len(part_of) and not is_far):
            continue
        first, end = own, own + 1
        if is_far:
            first = node_of[own] * limits.per_node
            end = min(first + limits.per_node, len(size))
            if attempts == 1:
                roomiest = first
                for to in range(first, end):
                    if limits.load[to] - load[to] > limits.load[roomiest] - load[roomiest]:
                        roomiest = to
                first, end = roomiest, roomiest + 1
        best, taker, returns = ZERO, NONE, NONE
        for other_part in range(first - 1, end):  # home first, which saves most
            to = other_part if other_part >= first else own
            gain = _cost(home, price, node_of, sample, part, to)
            if gain >= best:
                continue
            least = work[sample] - (limits.load[to] - load[to])
            most = work[sample] + limits.load[part] - load[part]
            may_go = least <= 0 <= most and size[part] > limits.fewest and size[to] < limits.most
            if may_go and amount[to] + other[sample] <= limits.other[to]:
                best, taker, returns = gain, to, NONE
            low, high = start[to], start[to] + size[to]
            while low < high:  # to behind the lightest sample with at least so much work
                middle = (low + high) // 2
                if work[members[middle]] >= least:
                    low = middle + 1
                else:
                    high = middle
            for at in range(low - 1, max(low - 1 - attempts * TRIES, start[to] - 1), -1):
                returned = members[at]
                if work[returned] > most:
                    break
                change = other[sample] - other[returned]
                if change > 0 and amount[to] + change > limits.other[to]:
                    continue
                if change < 0 and amount[part] - change > limits.other[part]:
                    continue
                cost = gain + _cost(home, price, node_of, returned, to, part)
                # In its node, but not at home, it has moved anyway: worth another move if that saves half.
                is_worth_it = to == own or (2 * cost < gain and (home[returned] != to or most_moved > 0))
                if cost < best and is_worth_it:
                    best, taker, returns = cost, to, returned
        if taker != NONE:
            if returns != NONE and taker != own and home[returns] == taker:
                most_moved -= 1
            _move(samples, lists, part_of, sample, taker)
            _move(samples, lists, part_of, returns, part)


@compiled
def settle(
    samples: Samples, limits: Limits, part_of: np.ndarray, swaps_only: bool, most_stuck: int, most_moved: int
) -> bool:
    """Brings parts within their limits, near home if samples have one.

    Returns True only if all samples have a part, and no part is above a limit.

    1. Samples that no part may keep leave, and are placed near home. Swaps level the rest, inside each node
       and then over all.
    2. If a part is stuck, more samples leave at once: from where the swaps have led if there is much room,
       and from the beginning if not. Where there is, a part counts as stuck sooner, because this is cheap.
    3. The parts that are still above a limit are dealt anew, longest first, with as many of the emptiest,
       then with four times as many, and so on.
    4. Last, samples return home where the limits allow it.

    With `swaps_only`, there is no other step but the last, whether or not parts are above their limits. Swaps
    end where `most_stuck` parts are stuck, or more than `most_moved` samples have left their home. With such
    a limit, only samples that this call has moved return.
    """
    num_parts, given = len(limits.load), part_of.copy()
    kept = given if swaps_only and 0 < most_moved < NO_CAP else samples.home
    num_nodes = -(-num_parts // limits.per_node) if 1 < limits.per_node < num_parts else ZERO
    stuck, factor, step, total, most = ZERO, ONE, SWAPS, 0.0, 0.0
    for sample in range(len(part_of)):
        total += samples.work[sample]
    for part in range(num_parts):
        most += limits.load[part]
    has_room = total < MUCH_ROOM * most and not swaps_only
    lists = _make_lists(samples, part_of, num_parts)
    while True:
        goes, is_last = step == DEALS, swaps_only
        if step == DEALS:
            is_last = _take_out(limits, lists, part_of, factor)
            factor *= 4
        elif not swaps_only:
            goes = _evict(samples, limits, part_of, lists, step == SWAPS, has_room)
        is_settled = not goes or place(samples, limits, part_of, step != DEALS)
        if goes:
            _list_again(samples, lists, part_of)
        in_nodes = num_nodes if step != DEALS else ZERO
        for node in range(in_nodes + 1):  # each of them, and then all parts
            is_all = node == in_nodes
            first = ZERO if is_all else node * limits.per_node
            end = num_parts if is_all else min(first + limits.per_node, num_parts)
            stuck_at = most_stuck if is_all and step != DEALS else num_parts
            most_partners = MANY_PARTNERS
            if is_all and (step != SWAPS or has_room):
                most_partners = FEW_PARTNERS if step == SWAPS else FROM_ALL
            stuck, most_moved = _level(
                samples, limits, part_of, lists, first, end, stuck_at, most_moved, most_partners
            )
        is_settled = is_settled and stuck == 0
        if is_settled or is_last:
            attempts = ONE + int(num_nodes > 0 and not (has_room or swaps_only))
            _send_home(samples, limits, part_of, lists, kept, most_moved, attempts)
            num_placed = ZERO
            for part in range(num_parts):
                num_placed += lists.size[part]
                is_settled = is_settled and lists.amount[part] <= limits.other[part]
            return is_settled and num_placed == len(part_of)
        if step == SWAPS and not has_room:
            for sample in range(len(part_of)):
                part_of[sample] = given[sample]
            _list_again(samples, lists, part_of)
        step = min(step + 1, DEALS)


@inner
def _take_out(limits: Limits, lists: Lists, part_of: np.ndarray, factor: int) -> bool:
    """Writes NONE to samples of parts above their limit, and of `factor` times as many of the emptiest.

    Returns whether that is all parts.
    """
    num_parts, count = len(limits.load), ZERO
    bits, keys = _bits(num_parts), np.empty(num_parts, dtype=np.int64)
    for part in range(num_parts):
        count += factor * (lists.load[part] > limits.load[part])
        keys[part] = ((lists.load[part] - limits.load[part]) << bits) | part
    count = min(max(count, factor), num_parts)  # where none is above its limit, a sample has no place
    last = _sorted(keys)[count - 1]
    for sample in range(len(part_of)):
        part = part_of[sample]
        if part != NONE and (keys[part] <= last or lists.load[part] > limits.load[part]):
            part_of[sample] = NONE
    return count == num_parts


@compiled
def shortest_time(work: np.ndarray, speeds: np.ndarray, fewest: int, most: int) -> float:
    """A time that the slowest part takes at least, given descending work and ascending speeds.

    `lower_bound` gives the proof.
    """
    num_samples, num_parts = len(work), len(speeds)
    sums = np.zeros(num_samples + 1, dtype=np.int64)  # of the heaviest samples
    for sample in range(num_samples):
        sums[sample + 1] = sums[sample] + work[sample]
    # 1. The q fastest parts together, at q − 1; all of them give the mean.
    fastest = np.empty(num_parts)
    fastest[0] = speeds[num_parts - 1]
    for q in range(1, num_parts):
        fastest[q] = fastest[q - 1] + speeds[num_parts - 1 - q]
    bound = sums[num_samples] / fastest[num_parts - 1]
    # 2. Some q parts hold j · q of the m heaviest samples, and the lightest ones up to their sizes.
    for before in range(0, num_samples, num_parts):
        j = before // num_parts + 1
        for q in range(1, min(num_parts, num_samples - before) + 1):
            m, others = before + q, max(fewest - j, 0) * q
            load = sums[m] - sums[m - j * q] + sums[num_samples] - sums[num_samples - others]
            if load > bound * fastest[q - 1]:
                bound = load / fastest[q - 1]
    # 3. The q slowest parts hold the lightest samples at least, as many as sizes demand.
    slowest = 0.0
    for q in range(1, num_parts if speeds[0] < 1.0 else 0):
        slowest += speeds[q - 1]
        rows = max(q * fewest, num_samples - (num_parts - q) * most)
        bound = max(bound, (sums[num_samples] - sums[num_samples - rows]) / slowest)
    return bound


@compiled
def place_by_differencing(work: np.ndarray, num_parts: int, width: int) -> np.ndarray:
    """int64 `[samples]`, the part of each, by merging partial partitions, the two worst balanced first.

    A merge joins the heaviest part of one partition with the lightest of the other, and so on. Partitions
    start with `width` samples of `work`, which is descending, each in a part of its own.

    Example: work [8, 7, 6, 5, 4] on two parts starts as (8, 0), (7, 0), (6, 0), (5, 0), (4, 0). The worst
    balanced are the first two; merged, they are (8, 7). Then 6 and 5 become (6, 5). 4 joins 7 to (11, 8),
    which meets (6, 5) to end as (8 + 6, 7 + 4 + 5) = (14, 16).
    """
    num_samples = len(work)
    # 1. A partition is a chain of slots, one for each part with samples, the heaviest first: `below` leads to
    # the next. A slot is named by its first sample; `after` leads to the other samples of the part.
    load, tail, below, after = work.copy(), np.empty_like(work), np.empty_like(work), np.empty_like(work)
    for sample in range(num_samples):
        tail[sample], below[sample], after[sample] = sample, sample + 1, NONE
    count = (num_samples + width - 1) // width
    top, size = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    bits = _bits(max(count, num_parts))
    mask = (ONE << bits) - 1
    heap, at_of = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for p in range(count):
        top[p], size[p] = p * width, min(num_samples - p * width, width)
        spread = work[p * width] - (work[p * width + width - 1] if size[p] == num_parts else 0)
        _sift(heap, at_of, mask, p, p, (-spread << bits) | p)  # the largest spread is the smallest key
    slots, sums = np.empty(num_parts, dtype=np.int64), np.empty(num_parts, dtype=np.int64)
    ordered = np.empty(num_parts, dtype=np.int64)
    while count > 1:
        # 2. Take the two partitions with the largest spreads, the distance of their heaviest and lightest.
        one = heap[0] & mask
        count -= 1
        _sift(heap, at_of, mask, ZERO, count, heap[count])
        other = heap[0] & mask
        # 3. Slot p of the first meets slot length − 1 − p of the second.
        length, rows = min(size[one] + size[other], num_parts), size[one]
        alone = length - size[other]
        slot = top[other]
        for p in range(length - 1, alone - 1, -1):
            slots[p] = slot
            slot = below[slot]
        slot = top[one]
        for p in range(length):
            if p < alone:
                slots[p] = slot
            elif p < rows:
                joined = slots[p]
                load[joined] += load[slot]
                after[tail[joined]] = slot
                tail[joined] = tail[slot]
            if p < rows:
                slot = below[slot]
            sums[p] = (-load[slots[p]] << bits) | p
        by_load = _sorted(sums[:length])
        for p in range(length):
            ordered[p] = slots[by_load[p] & mask]
        for p in range(1, length):
            below[ordered[p - 1]] = ordered[p]
        # 4. The merged partition takes the place of the second in the heap.
        top[one], size[one] = ordered[0], length
        lightest = load[ordered[length - 1]] if length == num_parts else 0
        _sift(heap, at_of, mask, ZERO, count, ((lightest - load[top[one]]) << bits) | one)
    # 5. Follow the samples of each part of the last partition.
    part_of = np.empty(num_samples, dtype=np.int64)
    last = heap[0] & mask if count > 0 else 0
    slot = top[last] if count > 0 else NONE
    for part in range(size[last] if count > 0 else 0):
        sample = slot
        while sample != NONE:
            part_of[sample] = part
            sample = after[sample]
        slot = below[slot]
    return part_of


class Groups(NamedTuple):
    """Samples that should be together; all arrays are int64. `number` and `marks` are room to work in."""

    of: np.ndarray  # [samples], the group of each; a sample without others is a group
    copy: np.ndarray  # [groups], cost of each part with samples of it beyond the first; 0 for a sample alone
    number: np.ndarray  # [groups], NONE outside of `_list_runs`
    marks: np.ndarray  # [groups], 0 outside of `_list_runs`


class Runs(NamedTuple):
    """Runs that a part may give to another: the first samples of any of its groups; last, a run of none.

    Run i ends with the i-th sample. All arrays but `sample` are int64 `[samples + 1]`.
    """

    sample: np.ndarray  # [samples], by group; those of a group that cost nothing to move come first
    begin: np.ndarray  # where each run begins
    group: np.ndarray  # NONE for the run of none
    work: np.ndarray
    other: np.ndarray
    cost: np.ndarray  # of moves, and of copies
    by_cost: np.ndarray


@inner
def _list_runs(samples: Samples, limits: Limits, groups: Groups, lists: Lists, part: int, to: int) -> Runs:
    """Lists what `part` may give to another part, and what each of that costs.

    Example: a part has samples 3 and 5 of a group, which is in no other part, and a copy costs 64. Sample 3
    is away from home as it is. Its run is [3] at a cost of 64, and [3, 5] costs 1, the move of sample 5.
    """
    home, price, node_of = samples.home, samples.price, limits.node_of
    members, number, marks = lists.members, groups.number, groups.marks
    first, count = lists.start[part], lists.size[part]
    # 1. Number groups in the order of their heaviest samples; odd are samples that cost something to move.
    keys, num_groups = np.empty(count, dtype=np.int64), ZERO
    for at in range(count):
        sample = members[first + at]
        group = groups.of[sample]
        if number[group] == NONE:
            number[group] = num_groups
            num_groups += 1
        keys[at] = 2 * number[group] + (_cost(home, price, node_of, sample, part, to) > 0)
    order, ends = bucket(keys, 2 * num_groups)
    for at in range(lists.start[to], lists.start[to] + lists.size[to]):
        marks[groups.of[members[at]]] = 1
    # 2. Add the samples of each group up.
    taken, begin = np.empty(count, dtype=np.int64), np.empty(count + 1, dtype=np.int64)
    group_of, work = np.empty(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    other, cost = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    bits = _bits(count + 1)
    keys = np.empty(count + 1, dtype=np.int64)
    at = ZERO
    for group_at in range(num_groups):
        start, end = at, ends[2 * group_at + 1]
        group = groups.of[members[first + order[start]]]
        works, others, costs = ZERO, ZERO, ZERO
        if marks[group] == 0:
            costs += groups.copy[group]
        while at < end:
            sample = members[first + order[at]]
            works += samples.work[sample]
            others += samples.other[sample]
            costs += _cost(home, price, node_of, sample, part, to)
            taken[at], begin[at], group_of[at], work[at], other[at] = sample, start, group, works, others
            cost[at] = costs - (groups.copy[group] if at + 1 == end else 0)
            keys[at] = (cost[at] << bits) | at
            at += 1
        number[group] = NONE
    begin[count], group_of[count], keys[count] = count + 1, NONE, count
    for at in range(lists.start[to], lists.start[to] + lists.size[to]):
        marks[groups.of[members[at]]] = 0
    by_cost = _sorted(keys)
    for at in range(count + 1):
        by_cost[at] &= (ONE << bits) - 1
    return Runs(taken, begin, group_of, work, other, cost, by_cost)


@inner
def _find_exchange(
    limits: Limits,
    lists: Lists,
    part: int,
    gives: Runs,
    to: int,
    returns: Runs,
    least: int,
    most: int,
) -> tuple[int, int]:
    """(run that `part` gives, run that comes back) of the exchange that saves most; NONE where none saves.

    It takes `least` to `most` off the part.

    Example: of part 0, [a a a a] of work 40 costs 4 moves and saves no copy; part 1 has [b b b b] of 32 at
    the same price, and [c c c] of 36. With equal rows and 5 to 10 to take off, a goes for b at a cost of 8.
    """
    size = lists.size
    net_least = max(size[part] - limits.most, limits.fewest - size[to])  # rows that leave the part
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
    """Places units of samples, in that order: at home where there is room, else in the part with most room.

    1. Of the homes of a unit that have room for it within the limits, it goes to that where most of it stays.
    2. Else it goes to the part with most room, if that has enough up to `most_load`, which may be above the
       limits; or to any such part.
    3. Else the part that can take most of it takes that, and the rest is placed in the same way.

    Example: two parts of 4 rows, with loads up to 20. Units of 4, 2 and 2 samples with 4 of work each, all at
    home in part 0: the first stays there, and the others go to part 1.
    """
    home, other, num_parts = samples.home, samples.other, len(limits.load)
    load, amount = np.zeros(num_parts, dtype=np.int64), np.zeros(num_parts, dtype=np.int64)
    size, at_home = np.zeros(num_parts, dtype=np.int64), np.zeros(num_parts, dtype=np.int64)
    bits = _bits(num_parts)
    mask = (ONE << bits) - 1
    heap, at_of, end = np.empty(num_parts, dtype=np.int64), np.empty(num_parts, dtype=np.int64), num_parts
    for part in range(num_parts):
        _sift(heap, at_of, mask, part, part, (-limits.load[part] << bits) | part)
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
                for at in range(NONE, end):  # first the top of the heap, which likely has room for all
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
            if size[chosen] == limits.most:  # it leaves the heap
                end -= 1
                if at_of[chosen] < end:
                    _sift(heap, at_of, mask, at_of[chosen], end, heap[end])
            else:
                key = ((load[chosen] - limits.load[chosen]) << bits) | chosen
                _sift(heap, at_of, mask, at_of[chosen], end, key)


@compiled
def reunite(samples: Samples, limits: Limits, groups: Groups, part_of: np.ndarray) -> None:
    """Makes exchanges that save costs and keep to the limits, between parts that share a group.

    1. The parts that have some of a group are sorted, those with most of it first.
    2. Each, from the last on, meets some of those before it that have other samples, too: the cheapest
       exchange of what one has of any group for what the other has is made, if it saves costs.
    3. Parts that have not changed since they met for the same group do not meet again.

    Example: with equal rows, part 0 has [a a a b], part 1 [a b b b], all of the same work. A copy costs 64.
    They meet for a: part 1 gives its a for the b of part 0, which saves two copies at the cost of two moves.
    """
    num_parts = len(limits.load)
    lists = _make_lists(samples, part_of, num_parts)
    load, members, start, size = lists.load, lists.members, lists.start, lists.size
    by_group, ends = bucket(groups.of, len(groups.copy))
    rows, parts = np.zeros(num_parts, dtype=np.int64), np.empty(num_parts, dtype=np.int64)
    changed, tried_at = np.ones(num_parts, dtype=np.int64), np.zeros(len(groups.copy), dtype=np.int64)
    clock, looks = ONE, LOOKS * len(part_of)
    for _ in range(REUNITE_PASSES):
        start_of, before = ZERO, clock
        for group in range(len(groups.copy)):
            begin, start_of = start_of, ends[group]
            count = ZERO
            for at in range(begin, start_of):
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
            ordered = _sorted(parts[:count])
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
                        continue  # likely all of the part
                    tried += 1
                    if max(changed[part], changed[to]) <= last_try or looks < 0:
                        continue
                    looks -= 2 * LOOKS_PER_ROW * (size[part] + size[to])  # to list runs, and to compare them
                    may_give = _list_runs(samples, limits, groups, lists, part, to)
                    may_return = _list_runs(samples, limits, groups, lists, to, part)
                    least, most = load[part] - limits.load[part], limits.load[to] - load[to]
                    give, back = _find_exchange(limits, lists, part, may_give, to, may_return, least, most)
                    if give != NONE:
                        gives, returns = may_give.begin[give], may_return.begin[back]
                        while gives <= give or returns <= back:  # one each, so that sizes stay close
                            if gives <= give:
                                _move(samples, lists, part_of, may_give.sample[gives], to)
                            if returns <= back:
                                _move(samples, lists, part_of, may_return.sample[returns], part)
                            gives, returns = gives + 1, returns + 1
                        clock += 1
                        changed[part], changed[to] = clock, clock
        if clock == before:
            break
