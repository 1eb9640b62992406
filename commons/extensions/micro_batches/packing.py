"""Packs samples into few micro-batches under a token cap, with loads as equal as possible."""

from __future__ import annotations

import warnings
from bisect import bisect_left, insort
from contextlib import suppress

import numpy as np
from numpy.typing import ArrayLike

from ...partition.kernels import sum_per_part
from ...partition.problem import heaviest_first, indices_of_parts
from ...partition.refined import refine, refined
from ...partition.workloads import MOST_TOKENS, as_integers, as_tokens, as_workloads, check_count

# Bits of the sum of all work. Micro-batches are sorted by loads of this precision.
SUM_BITS = 62
# The heaviest micro-batch of a rank may exceed the lower bound by this share.
TOLERANCE = 0.005


def pack_micro_batches(
    workloads: ArrayLike, tokens: ArrayLike, max_tokens: int, multiple_of: int = 1, min_count: int = 1
) -> list[np.ndarray]:
    """Divides samples into few micro-batches under a token cap, with loads as equal as possible.

    The number of micro-batches is the smallest for which a division is found, from `min_count` on. It is at
    most the larger of `min_count` and what best-fit decreasing by tokens needs, rounded up to the multiple.
    With thousands of samples, not all numbers are tried.

    Provisional: may change in a minor version.

    Args:
        workloads: Cost of each sample, `[samples]`, non-negative.
        tokens: Number of tokens of each sample, `[samples]`, whole numbers.
        max_tokens: Largest number of tokens in a micro-batch, at least 1. A sample with more tokens gets a
            micro-batch of its own, and a warning names it.
        multiple_of: Divisor of the number of micro-batches.
        min_count: Smallest number of micro-batches.

    Returns:
        Indices of the samples of each micro-batch, int64, ascending. The lightest micro-batch comes first. A
        micro-batch is empty only if there are fewer samples than micro-batches.

    Raises:
        ValueError: A value is negative, NaN, or infinite, tokens are not whole, or a count is below 1.
    """
    work, counts, cap = check_samples(workloads, tokens, max_tokens, multiple_of, min_count)
    above = np.flatnonzero(counts > cap)
    if above.size:
        largest = int(np.argmax(counts))
        warnings.warn(
            f"samples {above[:10].tolist()}{' and more' if above.size > 10 else ''} have more than "
            f"max_tokens={cap} tokens (sample {largest} has {counts[largest]}), and share no micro-batch",
            stacklevel=2,
        )
    least = int(least_counts(counts, cap, np.zeros_like(counts), 1)[0])
    return pack(work, counts, cap, int(multiple_of), max(int(min_count), least))


def pack(
    work: np.ndarray, tokens: np.ndarray, max_tokens: int, multiple_of: int, least: int
) -> list[np.ndarray]:
    """Does the work of `pack_micro_batches`, without a warning, on samples that `check_samples` returned.
    `least` is the result of `least_counts`, or more."""
    alone, shared = np.flatnonzero(tokens > max_tokens), np.flatnonzero(tokens <= max_tokens)
    count = -(-least // multiple_of) * multiple_of - len(alone)
    parts = _share(work[shared], tokens[shared], max_tokens, count, multiple_of) if count > 0 else []
    micro_batches = [*alone[:, None], *(shared[part] for part in parts)]
    by_load = np.argsort([work[samples].sum() for samples in micro_batches], kind="stable")
    return [micro_batches[number] for number in by_load]


def _share(work: np.ndarray, tokens: np.ndarray, max_tokens: int, count: int, step: int) -> list[np.ndarray]:
    """Returns parts under the cap: count, count + step, …, as few as a bisection finds."""

    def attempt(count: int) -> list[np.ndarray] | None:
        with suppress(ValueError):  # no placement was found
            return [*refined(work, count, False, tolerance=TOLERANCE, tokens=tokens, max_tokens=max_tokens)]
        return None

    found = attempt(count)
    if found is not None:
        return found
    # 1. Best-fit decreasing needs at most `high` more steps.
    order, part_of = heaviest_first(tokens), np.empty_like(tokens)
    part_of[order] = _best_fit(tokens[order].tolist(), max_tokens)
    low, high = 1, max(-(-(int(part_of.max()) + 1 - count) // step), 0)
    most = count + high * step
    while low <= high:
        trial = (low + high) // 2
        parts = attempt(count + trial * step)
        if parts is None:
            low = trial + 1
        else:
            found, high = parts, trial - 1
    if found is not None:
        return found
    # 2. Otherwise, refine best-fit decreasing, after moving one sample into each empty part.
    first = np.unique(part_of[order], return_index=True)[1]
    others = np.delete(order, first)[: most - len(first)]
    part_of[others] = len(first) + np.arange(len(others))
    parts = indices_of_parts(part_of, most)
    return refine(work, parts, TOLERANCE, False, tokens=tokens, max_tokens=max_tokens)


def _best_fit(tokens: list[int], room: int) -> list[int]:
    """Returns the part of each sample. `tokens` descend, and are at most `room`, the capacity of a part.

    A sample goes into the part with the least room that fits it, the first if tied, or else into a new part.
    """
    parts, part_of, count = list[tuple[int, int]](), list[int](), 0  # (room left, part), ascending
    for needed in tokens:
        at = bisect_left(parts, (needed, 0))
        if at == len(parts):
            left, part = room, count
            count += 1
        else:
            left, part = parts.pop(at)
        part_of.append(part)
        if left - needed >= tokens[-1]:  # otherwise no further sample fits
            insort(parts, (left - needed, part))
    return part_of


def check_samples(
    workloads: ArrayLike, tokens: ArrayLike, max_tokens: int, multiple_of: int = 1, min_count: int = 1
) -> tuple[np.ndarray, np.ndarray, int]:
    """Checks all arguments. Returns (work, tokens, max_tokens), with work and tokens int64 `[samples]`."""
    for name, count in (("multiple_of", multiple_of), ("min_count", min_count), ("max_tokens", max_tokens)):
        check_count(name, count)
    work = as_integers(as_workloads(workloads), SUM_BITS)
    return work, as_tokens(tokens, len(work)), min(int(max_tokens), MOST_TOKENS)


def least_counts(tokens: np.ndarray, max_tokens: int, rank_of: np.ndarray, num_ranks: int) -> np.ndarray:
    """Returns a lower bound on the number of micro-batches of each rank, int64 `[ranks]`."""
    is_above, is_half = tokens > max_tokens, 2 * tokens > max_tokens
    shared = np.where(is_above, 0, tokens)
    smallest = np.full(num_ranks, max_tokens)
    np.minimum.at(smallest, rank_of[shared > 0], shared[shared > 0])
    num_above, num_half, num_shared, num_with_tokens = (
        np.bincount(rank_of[chosen], minlength=num_ranks)  # no two above half the cap fit together
        for chosen in (is_above, is_half & ~is_above, ~is_above, shared > 0)
    )
    by_number = -(-num_with_tokens // (max_tokens // smallest))
    by_tokens = -(-sum_per_part(shared, rank_of, num_ranks) // max_tokens)
    return num_above + np.maximum.reduce([by_tokens, num_half, by_number, np.minimum(num_shared, 1)])
