"""Local search: exchanges between the heaviest part and any other until none helps."""

from __future__ import annotations

import numpy as np

from commons.partition.balance import bound_of
from commons.partition.compiled import compiled
from commons.partition.parts import NONE, Limits, Parts, exchange, first_at_most, fits

# An exchange that lightens the heaviest part by less than this share of the mean load is not worth its time.
RESOLUTION = 3e-5
# A search that has found an exchange ends when this one takes the heaviest part so near the middle between it
# and the lightest (1/8 of their distance), and tries this many partners in either direction.
NEAR_ENOUGH = 8
TRIES = 16


@compiled
def target_load(work: np.ndarray, num_parts: int, limits: Limits, tolerance: float) -> int:
    """The load at which the heaviest part is light enough: (1 + tolerance) × the lower bound."""
    bound = bound_of(work, num_parts, limits.fewest)
    return max(int(np.ceil(bound)), int(min(bound * (1 + tolerance), 2.0**61)))


@compiled
def improve(parts: Parts, limits: Limits, target: int) -> None:
    """Exchanges samples of the heaviest part until it has at most the target load or none helps."""
    num_parts = len(parts.size)
    resolution = max(int(RESOLUTION * parts.work.sum() / num_parts), 1)
    while num_parts > 1:
        heavy = parts.by_load[num_parts - 1]
        if parts.load[heavy] <= target:
            break
        gives, partner, returns = _lightening_exchange(
            parts, limits, heavy, parts.load[heavy] - resolution + 1
        )
        if partner == NONE:
            break
        exchange(parts, heavy, gives, partner, returns)


@compiled
def _lightening_exchange(parts: Parts, limits: Limits, heavy: int, below: int) -> tuple[int, int, int]:
    """An exchange after which both parts have a load below `below`: (sample given, partner, sample returned).

    For a sample of the heavy part the best to get in return takes half the distance to the lightest part.
    From there the samples are tried in both directions, as long as they can be better than what is found.
    """
    work, part_of, loads = parts.work, parts.part_of, parts.load
    load, lightest = loads[heavy], loads[parts.by_load[0]]
    enough = load - (load - lightest) // 2 + (load - lightest) // NEAR_ENOUGH
    gives, partner, returns = NONE, NONE, NONE
    taker = NONE if parts.size[heavy] == limits.fewest else _lightest_taker(parts, limits, heavy, NONE)
    for at in range(parts.start[heavy], parts.start[heavy] + parts.size[heavy]):
        i = parts.members[at]
        middle = first_at_most(work, i + 1, work[i] - (load - lightest) // 2)
        for step in (1, -1):
            j = middle if step == 1 else middle - 1
            while i < j < len(work) and (partner == NONE or abs(j - middle) <= TRIES):
                difference = work[i] - work[j]
                if (lightest + difference if step == 1 else load - difference) >= below:
                    break
                larger = max(load - difference, loads[part_of[j]] + difference)
                if larger < below and part_of[j] != heavy and fits(parts, limits, heavy, i, part_of[j], j):
                    below, gives, partner, returns = larger, i, part_of[j], j
                j += step
        if taker != NONE and max(load - work[i], loads[taker] + work[i]) < below:
            other = _lightest_taker(parts, limits, heavy, i)  # the same, unless it has no room for its tokens
            if other != NONE and max(load - work[i], loads[other] + work[i]) < below:
                below, gives, partner, returns = max(load - work[i], loads[other] + work[i]), i, other, NONE
        if partner != NONE and below <= enough:
            break
    return gives, partner, returns


@compiled
def _lightest_taker(parts: Parts, limits: Limits, giver: int, sample: int) -> int:
    """The lightest part that has room for one more sample, and for this one unless it is NONE; else NONE."""
    for taker in parts.by_load:
        if taker == giver or parts.size[taker] == limits.most:
            continue
        if sample == NONE or fits(parts, limits, giver, sample, taker, NONE):
            return taker
    return NONE
