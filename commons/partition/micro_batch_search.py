"""The compiled search for micro-batches: which of its rank's each sample is in."""

from __future__ import annotations

import numpy as np

from commons.partition.compiled import compiled
from commons.partition.local_search import improve
from commons.partition.longest_first import place_longest_first
from commons.partition.parts import NONE, Limits, make_parts
from commons.partition.problem import NO_CAP

# Parts that are so near the mean one, by this share of its load, are not searched on.
NEAR_ENOUGH = 0.005
# How often ranks are filled again to the loads that the slowest ranks came out with.
ROUNDS = 2


@compiled
def arrange(
    work: np.ndarray, tokens: np.ndarray, rank_of: np.ndarray, num_ranks: int, count: int, max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Divides each rank's samples into micro-batches, so that the k-th ones of all ranks have like loads.

    Ranks are filled one by one, first all micro-batches alike; then each to the largest load that a k-th
    micro-batch has anywhere, because what stays below it costs nothing.

    Args:
        work: int64 `[samples]`, descending.
        tokens: int64 `[samples]`; one with more than `max_tokens` is alone in its micro-batch.
        rank_of: int64 `[samples]`.
        num_ranks: at least 1.
        count: micro-batches of a rank.
        max_tokens: of a micro-batch.

    Returns:
        int64 `[samples]`, each one's micro-batch, and int64 `[ranks, count]`, their loads, ascending for each
        rank; the first is NONE everywhere if some rank's samples found no place.
    """
    members = np.argsort(rank_of, kind="mergesort")
    ends = np.searchsorted(rank_of[members], np.arange(1, num_ranks + 1))
    slot_of = np.full(len(work), NONE, dtype=np.int64)
    loads = np.zeros((num_ranks, count), dtype=np.int64)
    best_slot_of, best_loads, best_time = slot_of, loads, 0
    profile = np.zeros(count, dtype=np.int64)
    for again in range(ROUNDS + 1):
        slot_of, loads = slot_of.copy(), loads.copy()
        for rank in range(num_ranks):
            samples = members[ends[rank - 1] if rank else 0 : ends[rank]]
            if not _fill_rank(work, tokens, samples, profile, max_tokens, slot_of, loads[rank]):
                return np.full(len(work), NONE, dtype=np.int64), loads
        profile = _profile(loads)
        time = profile.sum()
        if again == 0 or time < best_time:
            best_slot_of, best_loads, best_time = slot_of, loads, time
        if count == 1 or num_ranks == 1:
            break
    return _lightest_first(rank_of, best_slot_of, best_loads)


@compiled
def _profile(loads: np.ndarray) -> np.ndarray:
    """int64 `[count]`: the largest k-th load of any rank, the largest first; loads `[ranks, count]`."""
    profile = np.zeros(loads.shape[1], dtype=np.int64)
    for rank in range(len(loads)):
        profile = np.maximum(profile, np.sort(loads[rank])[::-1])
    return profile


@compiled
def _lightest_first(
    rank_of: np.ndarray, slot_of: np.ndarray, loads: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    place = np.empty_like(loads)
    for rank in range(len(loads)):
        place[rank][np.argsort(loads[rank], kind="mergesort")] = np.arange(loads.shape[1])
        loads[rank].sort()
    numbers = np.empty_like(slot_of)
    for sample in range(len(slot_of)):
        numbers[sample] = place[rank_of[sample], slot_of[sample]]
    return numbers, loads


@compiled
def _fill_rank(
    work: np.ndarray,
    tokens: np.ndarray,
    samples: np.ndarray,
    profile: np.ndarray,
    max_tokens: int,
    slot_of: np.ndarray,
    loads: np.ndarray,
) -> bool:
    """Fills one rank's micro-batches towards a profile; changes `slot_of` and `loads`.

    Samples above the cap take the first ones, the others share the rest, the heaviest micro-batch first.

    Returns:
        Whether all samples found a place.
    """
    is_over = tokens[samples] > max_tokens
    over, others = samples[is_over], samples[~is_over]
    count = len(profile) - len(over)
    if count < 0 or (count == 0 and len(others) > 0):
        return False
    loads[:] = 0
    for slot in range(len(over)):
        slot_of[over[slot]] = slot
        loads[slot] = work[over[slot]]
    if count == 0:
        return True
    # With what its profile lacks to the largest as a load from the start, all have the same target.
    base = profile.max() - profile[len(over) :]
    filled = _fill(work[others], tokens[others], base, max_tokens, slot_of[others] - len(over))
    if len(others) > 0 and filled[-1] == NONE:
        return False
    of_others = np.zeros(count, dtype=np.int64)
    for i in range(len(others)):
        of_others[filled[i]] += work[others[i]]
    order = np.argsort(-of_others, kind="mergesort")
    loads[len(over) :] = of_others[order]
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    slot_of[others] = place[filled] + len(over)
    return True


@compiled
def _fill(
    work: np.ndarray, tokens: np.ndarray, base: np.ndarray, max_tokens: int, before: np.ndarray
) -> np.ndarray:
    """int64 `[samples]`: parts under the cap with loads, on top of `base` `[parts]`, as equal as possible.

    What was found `before` is improved, too; negative numbers if nothing was. The last is NONE if no place
    was found for all.
    """
    limits = Limits(0, len(work), max_tokens)
    part_of = place_longest_first(work, tokens, base, limits)
    if len(work) == 0:
        return part_of
    target = (base.sum() + np.int64((1 + NEAR_ENOUGH) * work.sum())) // len(base)
    if part_of[-1] == NONE and before[0] < 0:
        part_of = _by_tokens(tokens, len(base), max_tokens)
        if part_of[-1] == NONE:
            return part_of
    if part_of[-1] != NONE:
        improve(make_parts(work, tokens, part_of, base), limits, target)
    if before[0] >= 0:
        improve(make_parts(work, tokens, before, base), limits, target)
        if part_of[-1] == NONE or _largest(work, before, base) < _largest(work, part_of, base):
            return before
    return part_of


@compiled
def _largest(work: np.ndarray, part_of: np.ndarray, base: np.ndarray) -> int:
    loads = base.copy()
    for sample in range(len(work)):
        loads[part_of[sample]] += work[sample]
    return loads.max()


@compiled
def _by_tokens(tokens: np.ndarray, num_parts: int, max_tokens: int) -> np.ndarray:
    """int64 `[samples]`: parts under the cap, their loads disregarded; the last is NONE if none were found.

    Balanced by tokens; where that fails, each sample, the largest first, to the part that it fills best.
    """
    order = np.argsort(-tokens, kind="mergesort")
    amounts, nothing = tokens[order], np.zeros(num_parts, dtype=np.int64)
    limits = Limits(0, len(tokens), NO_CAP)
    placed = place_longest_first(amounts, np.zeros_like(amounts), nothing, limits)
    improve(make_parts(amounts, np.zeros_like(amounts), placed, nothing), limits, max_tokens)
    if _largest(amounts, placed, nothing) > max_tokens:
        placed = _best_fit(amounts, num_parts, max_tokens)
    part_of = np.full(len(tokens), NONE, dtype=np.int64)
    if placed[-1] != NONE:
        part_of[order] = placed
    return part_of


@compiled
def _best_fit(amounts: np.ndarray, num_parts: int, max_tokens: int) -> np.ndarray:
    """Best-fit decreasing, of `amounts` in descending order; NONE from the first that fits nowhere."""
    left = np.full(num_parts, max_tokens, dtype=np.int64)
    part_of = np.full(len(amounts), NONE, dtype=np.int64)
    for sample in range(len(amounts)):
        best = NONE
        for part in range(num_parts):
            if left[part] >= amounts[sample] and (best == NONE or left[part] < left[best]):
                best = part
        if best == NONE:
            break
        left[best] -= amounts[sample]
        part_of[sample] = best
    return part_of
