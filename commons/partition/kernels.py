"""The core's compiled functions: operations that change one state, which is the parts and their samples.

Samples are numbered from the heaviest down, so comparing two numbers compares work and breaks ties. Work is
int64, so sums are exact in any order. It is at least 1, so that samples of no cost spread like others. Tokens
in place of work may be 0. Heap and sort keys are `value << bits | index`, so that one comparison also breaks
ties by index.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from .compiled import compiled, inlined, inner

# Numba gives every literal a type of its own. It recompiles a function for each literal argument, and repeats
# type inference if a variable starts as a literal. So variables start as these constants. NONE stands for no
# sample, or no part.
NONE, ZERO, ONE = cast(tuple[int, int, int], tuple(np.arange(-1, 2)))
NO_CAP = 2**62
# A byte to another node costs as much as this many bytes within a node, so samples leave their node last.
ACROSS_NODES = 1000
# Number of parts that leveling tries as partners, of the emptiest, then of all: a part with a giant may be as
# full as others, but the only one that helps. Then how often it may halve what a swap must take off: over all
# parts, and inside a node. "What moves cost" (lognormal, nodes of 8) decides all four.
FEW_PARTNERS, MANY_PARTNERS, HALVINGS, FEW_HALVINGS = 7, 127, 7, 2
# Once pushed above its limit this often, a part no longer pushes partners above theirs. Parts could otherwise
# pass work on for long. "Movement" (lognormal, d = 1024) decides that partners may be pushed at all.
MOST_VISITS = 3
# Number of samples tried in return for one, if the lightest would break the other limit. More take longer.
TRIES = 4
# Work below this share of all limits leaves much room. Samples next to a giant then leave at once, because
# swaps take longer. "Plans at size" (lognormal, 64 ranks) decides it.
MUCH_ROOM = 0.9
# Leveling may look at each sample this many times on average, so that hard problems end, too.
LOOKS = 2048
# Fullness is a fixed-point number of at most 2**10, with 32 bits after the point.
_SHARE, _MOST_SHARE = 2.0**32, 2.0**10


class Samples(NamedTuple):
    """Samples from the heaviest to the lightest; all arrays are int64 `[samples]`."""

    work: np.ndarray
    other: np.ndarray  # a second measure with limits of its own, or zeros
    home: np.ndarray  # home part of each sample; NONE if it has none
    price: np.ndarray  # cost of leaving home, all 0 or all above 0; times ACROSS_NODES for another node


class Limits(NamedTuple):
    """Limits of parts; arrays are int64 `[parts]`."""

    load: np.ndarray  # largest sum of work, at least 1
    other: np.ndarray  # largest sum of the second measure
    node_of: np.ndarray  # ascending; without nodes, each part is a node, or all are one
    per_node: int  # number of parts in a node
    fewest: int  # smallest number of samples in a part
    most: int  # largest number of samples in a part


class Lists(NamedTuple):
    """The samples of every part, and their sums; all arrays are int64."""

    members: np.ndarray  # samples of part p, ascending, from start[p] on, followed by free room
    start: np.ndarray  # [parts + 1]
    size: np.ndarray  # [parts], number of samples
    load: np.ndarray  # [parts], sum of work
    amount: np.ndarray  # [parts], sum of the second measure


@compiled
def sum_per_part(values: np.ndarray, part_of: np.ndarray, num_parts: int) -> np.ndarray:
    """Returns the sum of int64 `values` in each part, int64 `[parts]`, without samples whose part is NONE."""
    sums = np.zeros(num_parts, dtype=np.int64)
    for sample in range(len(values)):
        if part_of[sample] != NONE:
            sums[part_of[sample]] += values[sample]
    return sums


@compiled
def bucket(numbers: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorts the indices of int64 `numbers` stably by number. Also returns where each of `count` numbers ends.

    Example: samples in parts [1, 0, 1, 2] are sorted to [1, 0, 2, 3], and the three parts end at [1, 3, 4].
    """
    ends = np.zeros(count + 1, dtype=np.int64)
    for number in numbers:
        ends[number + 1] += 1
    for number in range(count):
        ends[number + 1] += ends[number]
    indices = np.empty(len(numbers), dtype=np.int64)
    for index in range(len(numbers)):  # `ends` advances from each number's start to its end
        number = numbers[index]
        indices[ends[number]] = index
        ends[number] += 1
    return indices, ends[:count]


@inner
def num_bits(count: int) -> int:
    """Returns how many bits a number below `count` needs, at least 1."""
    bits = ONE
    while count > 1 << bits:
        bits += 1
    return bits


@inner
def sorted_keys(keys: np.ndarray) -> np.ndarray:
    """Returns distinct int64 `keys`, sorted by Shell's method. This compiles faster than NumPy's sort."""
    found, gap = keys.copy(), ONE
    while gap < len(keys) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, len(found)):
            key, j = found[i], i
            while j >= gap and found[j - gap] > key:
                found[j] = found[j - gap]
                j -= gap
            found[j] = key
        gap //= 3
    return found


@inner
def sift(heap: np.ndarray, at_of: np.ndarray, mask: int, at: int, end: int, key: int) -> None:
    """Sifts `key` from position `at` to where it belongs in heap[:end], and updates `at_of`."""
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
    """Places all samples without a part, the heaviest first. Returns whether every sample then has a part.

    1. A heap holds the parts that can take more. On top is the part with the most room below its load limit.
    2. With `near_home`, a sample goes home if it fits within the limits there. If not, it goes to the part
       with the most room in its own node, among those where it fits.
    3. Otherwise it goes to the part with the most room, even above its load limit, among those that keep the
       limit of the other measure.

    Example: work [8, 7, 6, 5, 4] on two empty parts goes to parts [0, 1, 1, 0, 0], with loads of 17 and 13.
    """
    work, other, home, node_of = samples.work, samples.other, samples.home, limits.node_of
    num_parts, num_samples = len(limits.load), len(work)
    load, amount = sum_per_part(work, part_of, num_parts), sum_per_part(other, part_of, num_parts)
    size = sum_per_part(np.ones_like(work), part_of, num_parts)
    spare = num_samples - num_parts * limits.fewest  # samples beyond the fewest of every part
    bits = num_bits(num_parts)
    mask = (ONE << bits) - 1
    keys, heap = np.empty(num_parts, dtype=np.int64), np.empty(num_parts, dtype=np.int64)
    at_of, end = np.empty(num_parts, dtype=np.int64), num_parts
    for part in range(num_parts):
        spare -= max(size[part] - limits.fewest, 0)
        keys[part] = ((load[part] - limits.load[part]) << bits) | part
        sift(heap, at_of, mask, part, part, keys[part])
    num_left = ZERO
    for sample in range(num_samples):
        if part_of[sample] != NONE:
            continue
        most = limits.most if spare > 0 else limits.fewest
        chosen, needed = NONE, other[sample]
        if near_home:
            own, below = home[sample], (1 - work[sample]) << bits  # parts with lower keys have room
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
            else:  # a full part leaves the heap
                end -= 1
                sift(heap, at_of, mask, ZERO, end, heap[end])
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
        sift(heap, at_of, mask, at_of[chosen], end, keys[chosen])
    return num_left == 0


@inner
def make_lists(samples: Samples, part_of: np.ndarray, num_parts: int) -> Lists:
    """Lists the samples of each part. Samples without a part are left out."""
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
    """Refills lists in place, with room for every part to double, because allocating large arrays is slow."""
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
def move(samples: Samples, lists: Lists, part_of: np.ndarray, sample: int, to: int) -> None:
    """Moves a sample to part `to`. Does nothing if the sample is NONE."""
    if sample == NONE:
        return
    members, start, size, source = lists.members, lists.start, lists.size, part_of[sample]
    if start[to] + size[to] == start[to + 1]:
        _list_again(samples, lists, part_of)
    # 1. Take the sample out, and close the gap.
    at, last = start[source], start[source] + size[source] - 1
    while members[at] != sample:
        at += 1
    while at < last:
        members[at] = members[at + 1]
        at += 1
    # 2. Insert the sample in ascending order.
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
    """Returns the cost of having a sample in a part: 0 at home, or without a home."""
    own = home[sample]
    if own != part and own != NONE:
        return price[sample] * (1 if node_of[own] == node_of[part] else ACROSS_NODES)
    return ZERO


@inner
def cost_of(home: np.ndarray, price: np.ndarray, node_of: np.ndarray, sample: int, part: int, to: int) -> int:
    """Returns the cost of moving a sample from `part` to `to`, negative if it gets closer to its home."""
    return _away(home, price, node_of, sample, to) - _away(home, price, node_of, sample, part)


@inner
def _evict(samples: Samples, limits: Limits, part_of: np.ndarray, lists: Lists, only_surplus: bool) -> bool:
    """Takes samples out of their parts by writing NONE to `part_of`. Returns whether any sample leaves.

    1. Samples beyond a part's size leave: the lightest, and as many of the heaviest as the limit demands.
    2. Parts above their limit lose their heaviest samples, but with equal sizes no giant, which is too heavy
       for the room of any part. In return, as many of the lightest leave parts below their limit, up to a
       quarter of each, of the same node and then of all. `only_surplus` allows this step only next to a
       giant, and under MUCH_ROOM.

    Example: the limit is 100, and parts of 4 samples have [97, 5, 4, 3] and [40, 30, 2, 1]. The giant of 97
    stays. In step 2, 5, 4, and 3 leave, and in return a quarter of the other part, its 1.
    """
    work, members, start, size, load = samples.work, lists.members, lists.start, lists.size, lists.load
    num_parts, has_nodes, room, total, limit = len(limits.load), limits.per_node > 1, ZERO, 0.0, 0.0
    for part in range(num_parts):
        room = max(room, limits.load[part] - load[part])
        total += load[part]
        limit += limits.load[part]
    has_room = total < MUCH_ROOM * limit
    spare = len(work) - num_parts * limits.fewest
    wanted = np.zeros(num_parts, dtype=np.int64)  # samples in return, per node
    num_out, num_wanted = ZERO, ZERO
    for part in range(num_parts):
        first, count, over = start[part], size[part], load[part] - limits.load[part]
        kept = min(max(count - limits.fewest, 0), limits.most - limits.fewest, spare)
        spare -= kept
        surplus = max(count - limits.fewest - kept, 0)
        # The lightest sample that no earlier part gets in return.
        lightest = work[max(len(work) - 1 - num_wanted, 0)] if limits.fewest > 0 and count > 0 else 0
        relief, giants, changes = ZERO, ZERO, ZERO
        for at in range(surplus):
            relief += work[members[first + count - 1 - at]]
        while relief < over and giants + changes < count:
            heaviest = work[members[first + giants + changes]]
            if changes == 0 and limits.fewest > 0 and heaviest - lightest > room:
                giants += 1
                continue
            # This sample leaves instead of a light surplus sample, or in return for one of the lightest.
            relief += heaviest - (
                work[members[first + count - surplus + changes]] if changes < surplus else lightest
            )
            changes += 1
        giants = min(giants, count - surplus)
        if only_surplus and not (has_room and giants > 0):
            changes = min(changes, surplus)
        light = max(surplus - changes, 0)
        for at in range(changes):
            part_of[members[first + giants + at]] = NONE
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
    """Returns the larger of load ÷ limit and other measure ÷ limit of a part, times 2**32."""
    share = max(lists.load[part] / limits.load[part], lists.amount[part] / max(limits.other[part], 1))
    return int(min(share, _MOST_SHARE) * _SHARE)


@inlined
def _find_swap(
    samples: Samples,
    limits: Limits,
    lists: Lists,
    full: int,
    givers: np.ndarray,
    first: int,
    end: int,
    partners: np.ndarray,
    num_partners: int,
    least: int,
    beyond: int,
    most_cost: int,
) -> tuple[int, int, int]:
    """Returns the cheapest swap: (sample that part `full` gives, part that takes it, sample that comes back).

    The sample given is one of givers[first:end]. The swap takes at least `least` off part `full`, leaves the
    partner at most `beyond` above its limit, and costs less than `most_cost`. If moves are free, the first
    swap found is returned. Without a swap, all three are NONE. If no sample comes back, the last is NONE.

    Two pointers over the samples of both parts find, for each sample given, the lightest that may come back.
    """
    work, other, home, price = samples.work, samples.other, samples.home, samples.price
    members, start, size, amount = lists.members, lists.start, lists.size, lists.amount
    node_of = limits.node_of
    gives, taker, returns, best = NONE, NONE, NONE, ZERO + most_cost
    is_free = len(price) > 0 and price[0] == 0
    for number in range(num_partners):
        to = partners[number]
        most = limits.load[to] - lists.load[to] + beyond
        if is_free and taker != NONE:
            break
        if to == full or most < least or first == end:
            continue
        may_give = size[full] > limits.fewest and size[to] < limits.most
        begin, stop = start[to], start[to] + size[to]
        lightest = ZERO if may_give or begin == stop else work[members[stop - 1]]
        pointer, after = begin, stop  # `pointer` becomes just past the lightest sample that may come back
        while pointer < after:
            middle = (pointer + after) // 2
            if work[givers[first]] - work[members[middle]] <= most:
                pointer = middle + 1
            else:
                after = middle
        for at in range(first, end):
            sample = givers[at]
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
                continue  # most samples end here, before their costs are looked up
            cost = cost_of(home, price, node_of, sample, full, to)
            if goes_alone and cost < best:
                gives, taker, returns, best = sample, to, NONE, cost
            if returned != NONE:
                cost += cost_of(home, price, node_of, returned, to, full)
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
) -> tuple[int, int]:
    """Levels the parts from `first` to `end` by swaps, so that none is above its load limit.

    Returns how many parts are stuck above their limit, and how many more samples may leave home.

    1. The fullest part comes first, as `_fullness` measures it. Its partners are the emptiest parts, near
       the top of a heap. If these do not help, more are tried, from all parts.
    2. The cheapest swap that takes off the whole excess is made, or else the cheapest that takes off half, a
       quarter, and so on. Such a swap may leave the partner up to 3/4 of that above its limit, for later.

    Leveling stops if `most_stuck` parts are stuck, or if more than `most_moved` samples would leave home.

    Example: the limit is 80, a part has 95, and its partner 70. The partner has room for 10, and the excess
    is 15. So a swap must take off at least half the excess, 7, and may put up to 10 + 6 on the partner.
    Swapping a sample of 25 for one of 10 levels the part, and leaves the partner 5 above its limit.
    """
    home, size, load, members = samples.home, lists.size, lists.load, lists.members
    count, bits, looks = end - first, num_bits(end - first), LOOKS * len(home)
    mask = (ONE << bits) - 1
    keys = np.empty(count, dtype=np.int64)  # parts are counted from `first`
    for at in range(count):
        keys[at] = (_fullness(limits, lists, first + at) << bits) | at
    heap, at_of = sorted_keys(keys), np.empty(count, dtype=np.int64)  # the emptiest part is on top
    queue, read, write = np.empty(count + 1, dtype=np.int64), ZERO, ZERO
    partners = np.empty(min(count, MANY_PARTNERS), dtype=np.int64)
    visits, is_queued = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for at in range(count - 1, -1, -1):
        number = heap[at] & mask
        at_of[number] = at
        if load[first + number] > limits.load[first + number]:
            queue[write], is_queued[number] = first + number, 1
            write += 1
    num_stuck, cap, halvings = ZERO, ZERO + NO_CAP, HALVINGS if count == len(limits.load) else FEW_HALVINGS
    while read != write and num_stuck < most_stuck:
        full = queue[read]
        read, is_queued[full - first] = (read + 1) % len(queue), 0
        halving, stride, tried = ZERO, ONE, min(count, FEW_PARTNERS)
        while load[full] > limits.load[full]:
            gives, taker, returns = NONE, NONE, NONE
            halving = max(halving - 1, 0)  # what failed before is unlikely to work now
            while taker == NONE and looks > 0:
                least = max((load[full] - limits.load[full]) >> halving, 1)
                beyond = least - least // 4 if halving > 0 and visits[full - first] < MOST_VISITS else 0
                looks -= 2 * tried * size[full]
                for at in range(tried):
                    partners[at] = first + (heap[at * stride] & mask)
                start, stop = lists.start[full], lists.start[full] + size[full]
                gives, taker, returns = _find_swap(
                    samples, limits, lists, full, members, start, stop, partners, tried, least, beyond, cap
                )
                if taker == NONE:
                    halving += 1
                    if halving > halvings:
                        if tried == len(partners):
                            break
                        halving, stride, tried = ZERO, count // len(partners), len(partners)
            if taker != NONE and home[gives] != NONE:
                most_moved -= int(taker != home[gives]) - int(full != home[gives])
                if returns != NONE:
                    most_moved -= int(full != home[returns]) - int(taker != home[returns])
            if taker == NONE or most_moved < 0:
                num_stuck += 1 if most_moved >= 0 else most_stuck
                break
            move(samples, lists, part_of, gives, taker)
            move(samples, lists, part_of, returns, full)
            for part in (full, taker):
                key = (_fullness(limits, lists, part) << bits) | (part - first)
                sift(heap, at_of, mask, at_of[part - first], count, key)
            if load[taker] > limits.load[taker] and is_queued[taker - first] == 0:
                queue[write], is_queued[taker - first] = taker, 1
                write = (write + 1) % len(queue)
                visits[taker - first] += 1
    return num_stuck, most_moved


@inner
def _send_home(samples: Samples, limits: Limits, part_of: np.ndarray, lists: Lists, kept: np.ndarray) -> None:
    """Moves samples to their home, or else to its node, alone or in a swap, within the limits.

    In its node, but not at home, a sample has still moved. So such a swap must keep half of what it saves. A
    sample in the part that `kept` names for it stays.
    """
    home, load, node_of = samples.home, lists.load, limits.node_of
    giver, partners = np.empty(1, dtype=np.int64), np.empty(limits.per_node, dtype=np.int64)
    for sample in range(len(part_of)):
        part, own = part_of[sample], home[sample]
        if part in (own, NONE, kept[sample]) or own == NONE:
            continue
        giver[0], partners[0], least = sample, own, load[part] - limits.load[part]
        _, taker, returns = _find_swap(
            samples, limits, lists, part, giver, ZERO, ONE, partners, ONE, least, ZERO, ZERO
        )
        if taker == NONE and limits.per_node > 1 and node_of[part] != node_of[own]:
            count, first = ZERO, node_of[own] * limits.per_node
            for to in range(first, min(first + limits.per_node, len(load))):
                partners[count] = to
                count += 1
            change = samples.price[sample] * (1 - ACROSS_NODES)
            _, taker, returns = _find_swap(
                samples, limits, lists, part, giver, ZERO, ONE, partners, count, least, ZERO, change // 2
            )
        if taker != NONE:
            move(samples, lists, part_of, sample, taker)
            move(samples, lists, part_of, returns, part)


@inner
def _level_nodes(samples: Samples, limits: Limits, part_of: np.ndarray, lists: Lists, most_moved: int) -> int:
    """Levels the parts of each node, and then all parts, until one is stuck. Returns how many are."""
    num_parts, per_node = len(limits.load), limits.per_node
    for first in range(0, num_parts if 1 < per_node < num_parts else 0, per_node):
        end = min(first + per_node, num_parts)
        _, most_moved = _level(samples, limits, part_of, lists, first, end, num_parts, most_moved)
    stuck, _ = _level(samples, limits, part_of, lists, ZERO, num_parts, ONE, most_moved)
    return stuck


@compiled
def level(samples: Samples, limits: Limits, part_of: np.ndarray, most_moved: int) -> None:
    """Levels parts by swaps until one is stuck, or more than `most_moved` samples would leave home.

    Samples that were swapped return home if the limits then allow it.
    """
    given, lists = part_of.copy(), make_lists(samples, part_of, len(limits.load))
    _level_nodes(samples, limits, part_of, lists, most_moved)
    _send_home(samples, limits, part_of, lists, given)


@compiled
def settle(samples: Samples, limits: Limits, part_of: np.ndarray) -> bool:
    """Brings parts within their limits. Samples with a home stay near it.

    Returns True only if all samples have a part, and no part is above a limit.

    1. Surplus samples leave their parts, and are placed near home. Swaps level parts, in each node, then all.
    2. If a part is stuck, heavy samples leave full parts in return for light ones, and swaps level again.
    3. If it still is, samples of parts above a limit are placed again, longest first, together with those of
       twice as many of the emptiest parts, then of four times as many, and so on.
    4. Last, samples return home if the limits allow it.
    """
    num_parts, factor, no_cap = len(limits.load), ONE + 1, ZERO + NO_CAP
    lists = make_lists(samples, part_of, num_parts)
    is_placed, is_done, yes = True, False, len(part_of) > 0  # a bool that is no literal
    for only_surplus in (True, False):
        if not is_done and _evict(samples, limits, part_of, lists, only_surplus):
            is_placed = place(samples, limits, part_of, yes)
            _list_again(samples, lists, part_of)
        if not is_done:
            is_done = _level_nodes(samples, limits, part_of, lists, no_cap) == 0 and is_placed
    while not is_done:
        is_done = _take_out(limits, lists, part_of, factor)
        factor *= 2
        is_placed = place(samples, limits, part_of, not yes)
        _list_again(samples, lists, part_of)
        stuck, _ = _level(samples, limits, part_of, lists, ZERO, num_parts, ONE, no_cap)
        is_done = is_done or (is_placed and stuck == 0)
    _send_home(samples, limits, part_of, lists, samples.home)
    is_settled, num_placed = True, ZERO
    for part in range(num_parts):
        num_placed += lists.size[part]
        is_settled = is_settled and lists.load[part] <= limits.load[part]
        is_settled = is_settled and lists.amount[part] <= limits.other[part]
    return is_settled and num_placed == len(part_of)


@inner
def _take_out(limits: Limits, lists: Lists, part_of: np.ndarray, factor: int) -> bool:
    """Takes out all samples of parts above their limit, and of `factor` times as many of the emptiest parts.

    Returns whether the number of emptiest parts has reached that of all parts.
    """
    num_parts, count = len(limits.load), ZERO
    bits, keys = num_bits(num_parts), np.empty(num_parts, dtype=np.int64)
    for part in range(num_parts):
        count += factor * (lists.load[part] > limits.load[part])
        keys[part] = ((lists.load[part] - limits.load[part]) << bits) | part
    count = min(max(count, factor), num_parts)  # if no part is above its limit, some sample has no part
    last = sorted_keys(keys)[count - 1]
    for sample in range(len(part_of)):
        part = part_of[sample]
        if part != NONE and (keys[part] <= last or lists.load[part] > limits.load[part]):
            part_of[sample] = NONE
    return count == num_parts


@compiled
def shortest_time(work: np.ndarray, speeds: np.ndarray, fewest: int, most: int) -> float:
    """Returns a lower bound on the time of the slowest part, for descending work and ascending speeds.

    `lower_bound` gives the proof.
    """
    num_samples, num_parts = len(work), len(speeds)
    sums = np.zeros(num_samples + 1, dtype=np.int64)  # sums of the heaviest samples
    for sample in range(num_samples):
        sums[sample + 1] = sums[sample] + work[sample]
    # 1. fastest[q − 1] is the speed of the q fastest parts together. All parts give the mean.
    fastest = np.empty(num_parts)
    fastest[0] = speeds[num_parts - 1]
    for q in range(1, num_parts):
        fastest[q] = fastest[q - 1] + speeds[num_parts - 1 - q]
    bound = sums[num_samples] / fastest[num_parts - 1]
    # 2. Some q parts hold j · q of the m heaviest samples. Their other samples weigh at least the lightest.
    for before in range(0, num_samples, num_parts):
        j = before // num_parts + 1
        for q in range(1, min(num_parts, num_samples - before) + 1):
            m, others = before + q, max(fewest - j, 0) * q
            load = sums[m] - sums[m - j * q] + sums[num_samples] - sums[num_samples - others]
            if load > bound * fastest[q - 1]:
                bound = load / fastest[q - 1]
    # 3. The q slowest parts hold at least the lightest samples, as many as the sizes demand.
    slowest = 0.0
    for q in range(1, num_parts if speeds[0] < 1.0 else 0):
        slowest += speeds[q - 1]
        rows = max(q * fewest, num_samples - (num_parts - q) * most)
        bound = max(bound, (sums[num_samples] - sums[num_samples - rows]) / slowest)
    return bound


@compiled
def place_by_differencing(work: np.ndarray, num_parts: int, width: int) -> np.ndarray:
    """Returns each sample's part, int64 `[samples]`, by repeatedly merging the two least balanced partitions.

    A merge joins the heaviest part of one partition with the lightest part of the other, and so on. Initial
    partitions have `width` samples of `work`, which is descending, each in a part of its own.

    Example: work [8, 7, 6, 5, 4] on two parts starts as (8, 0), (7, 0), (6, 0), (5, 0), (4, 0). The first two
    are the least balanced, and merge to (8, 7). Then 6 and 5 merge to (6, 5). 4 joins 7 in (11, 8), which
    merges with (6, 5) to (7 + 4 + 5, 8 + 6) = (16, 14).
    """
    num_samples = len(work)
    # 1. A partition is a chain of slots, one for each part with samples, the heaviest first. `below` leads to
    # the next slot. A slot is named by its first sample, and `after` leads to the part's other samples.
    load, tail, below, after = work.copy(), np.empty_like(work), np.empty_like(work), np.empty_like(work)
    for sample in range(num_samples):
        tail[sample], below[sample], after[sample] = sample, sample + 1, NONE
    count = (num_samples + width - 1) // width
    top, size = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    bits = num_bits(max(count, num_parts))
    mask = (ONE << bits) - 1
    heap, at_of = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for p in range(count):
        top[p], size[p] = p * width, min(num_samples - p * width, width)
        spread = work[p * width] - (work[p * width + width - 1] if size[p] == num_parts else 0)
        sift(heap, at_of, mask, p, p, (-spread << bits) | p)  # the largest spread is the smallest key
    slots, sums = np.empty(num_parts, dtype=np.int64), np.empty(num_parts, dtype=np.int64)
    while count > 1:
        # 2. Take the two partitions with the largest spreads, the heaviest part minus the lightest.
        one = heap[0] & mask
        count -= 1
        sift(heap, at_of, mask, ZERO, count, heap[count])
        other = heap[0] & mask
        # 3. Slot p of the first joins slot length − 1 − p of the second.
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
        by_load = sorted_keys(sums[:length])
        slot = slots[by_load[0] & mask]
        top[one], size[one] = slot, length
        for p in range(1, length):
            below[slot] = slots[by_load[p] & mask]
            slot = below[slot]
        # 4. The merged partition takes the place of the second in the heap.
        lightest = load[slot] if length == num_parts else 0
        sift(heap, at_of, mask, ZERO, count, ((lightest - load[top[one]]) << bits) | one)
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
