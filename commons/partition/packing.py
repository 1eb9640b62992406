"""Micro-batches under a token cap: few of them, with equal loads."""

from __future__ import annotations

import warnings
from bisect import bisect_left, insort
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import ArrayLike

from .problem import heaviest_first, indices_of_parts
from .refined import refine, refined
from .workloads import MOST_TOKENS, as_integers, as_tokens, as_workloads, check_count

# Bits of the sum of all work, by which micro-batches are in order.
SUM_BITS = 62
# The heaviest micro-batch of a rank is light enough this close above what is possible.
TOLERANCE = 0.005
# Numbers of micro-batches are tried for half a second: each takes about their product with samples ÷ 2, in
# nanoseconds.
MOST_EFFORT = 1_000_000_000


def pack_micro_batches(
    workloads: ArrayLike,
    tokens: ArrayLike,
    max_tokens: int,
    multiple_of: int = 1,
    min_count: int = 1,
    *,
    strict: bool = False,
) -> list[np.ndarray]:
    """Divides samples into few micro-batches under a token cap, with loads as equal as possible.

    The number of micro-batches is the smallest for which a division is found: never more than best-fit
    decreasing by tokens needs, rounded up to the multiple. Where `min_count` suffices, it is that many. Of
    thousands of samples, not all numbers are tried.

    Args:
        workloads: Costs of the samples, `[samples]`, non-negative.
        tokens: Tokens of each sample, whole numbers, `[samples]`.
        max_tokens: Number of tokens that a micro-batch may have, at least 1. A sample above it gets a
            micro-batch of its own, and a warning names it.
        multiple_of: Number that divides the number of micro-batches.
        min_count: Least number of micro-batches.
        strict: True for an error where a sample is above the cap, or a micro-batch is empty.

    Returns:
        Indices of the samples of each micro-batch, int64, ascending; the lightest micro-batch comes first.
        One is empty only where there are fewer samples than micro-batches.

    Raises:
        ValueError: A value is negative, NaN, or infinite; tokens are not whole numbers; a count is below 1;
            `strict` refuses a micro-batch.
    """
    samples = check_samples(workloads, tokens, max_tokens, multiple_of, min_count)
    report_above_cap(*samples[1:], strict)
    ranks = [pack(*samples, int(multiple_of), max(int(min_count), least_count(*samples[1:])))]
    if strict:
        refuse_empty(ranks)
    return ranks[0]


def pack(
    work: np.ndarray, tokens: np.ndarray, max_tokens: int, multiple_of: int, least: int
) -> list[np.ndarray]:
    """As `pack_micro_batches`, of samples as `check_samples` returns them, and without a warning; `least` is
    `least_count` or more."""
    alone, shared = np.flatnonzero(tokens > max_tokens), np.flatnonzero(tokens <= max_tokens)
    count = -(-least // multiple_of) * multiple_of - len(alone)
    parts = _share(work[shared], tokens[shared], max_tokens, count, multiple_of) if count > 0 else []
    micro_batches = [*alone[:, None], *(shared[part] for part in parts)]
    by_load = np.argsort([work[samples].sum() for samples in micro_batches], kind="stable")
    return [micro_batches[number] for number in by_load]


def _share(work: np.ndarray, tokens: np.ndarray, max_tokens: int, count: int, step: int) -> list[np.ndarray]:
    """Parts under the cap: the fewest of count, count + step, … for which a partition is found."""
    # 1. Best-fit decreasing never needs more than the last of these numbers.
    order, part_of = heaviest_first(tokens), np.empty_like(tokens)
    part_of[order] = _best_fit(tokens[order].tolist(), max_tokens)
    counts = range(count, max(int(part_of.max(initial=0)) + 1, count) + step, step)
    # 2. Try them from the first on, or every so many where there is no time for all.
    attempts = MOST_EFFORT // max(len(work) * count, 1)
    for number in counts[:: -(-len(counts) // attempts)] if attempts > 0 else ():
        with suppress(ValueError):  # no placement was found
            return refined(work, number, False, tolerance=TOLERANCE, tokens=tokens, max_tokens=max_tokens)
    # 3. Else start from best-fit decreasing, with a sample in each part.
    most, first = counts[-1], np.unique(part_of[order], return_index=True)[1]
    others = np.delete(order, first)[: most - len(first)]
    part_of[others] = len(first) + np.arange(len(others))
    parts = indices_of_parts(part_of, most)
    return refine(work, parts, TOLERANCE, False, tokens=tokens, max_tokens=max_tokens)


def _best_fit(tokens: list[int], room: int) -> list[int]:
    """The part of each sample, given descending tokens of at most `room`, the room of a part.

    Each sample goes where least room is left, of equal ones into the first part; else into a new one.
    """
    parts, part_of, count = list[tuple[int, int]](), list[int](), 0  # the room of each part, ascending
    for needed in tokens:
        at = bisect_left(parts, (needed, 0))
        if at == len(parts):
            left, part = room, count
            count += 1
        else:
            left, part = parts.pop(at)
        part_of.append(part)
        if left - needed >= tokens[-1]:  # else no sample fits into it
            insort(parts, (left - needed, part))
    return part_of


def check_samples(
    workloads: ArrayLike, tokens: ArrayLike, max_tokens: int, multiple_of: int = 1, min_count: int = 1
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns (work, tokens, max_tokens), int64 `[samples]`; raises the ValueErrors of all arguments."""
    for name, count in (("multiple_of", multiple_of), ("min_count", min_count), ("max_tokens", max_tokens)):
        check_count(name, count)
    work = as_integers(as_workloads(workloads), SUM_BITS)
    return work, as_tokens(tokens, len(work)), min(int(max_tokens), MOST_TOKENS)


def report_above_cap(tokens: np.ndarray, max_tokens: int, strict: bool) -> None:
    """Warns the caller's caller of samples that take a micro-batch of their own, or raises a ValueError."""
    above = np.flatnonzero(tokens > max_tokens)
    if not above.size:
        return
    largest = int(np.argmax(tokens))
    fault = (
        f"samples {above[:10].tolist()}{' and more' if above.size > 10 else ''} have more than "
        f"max_tokens={max_tokens} tokens (sample {largest} has {tokens[largest]})"
    )
    if strict:
        raise ValueError(f"{fault}: raise max_tokens, or leave them out")
    warnings.warn(
        f"{fault}: each gets a micro-batch of its own, which takes more memory than the cap allows",
        stacklevel=3,
    )


def least_count(tokens: np.ndarray, max_tokens: int) -> int:
    """Micro-batches that any division of int64 `[samples]` needs."""
    shared = tokens[tokens <= max_tokens]
    more_than_half = int((2 * shared > max_tokens).sum())  # no two of them fit together
    with_tokens = shared[shared > 0]
    most_together = max_tokens // int(with_tokens.min(initial=max_tokens))
    by_number = -(-len(with_tokens) // most_together)
    by_tokens = -(-int(shared.sum()) // max_tokens)
    return len(tokens) - len(shared) + max(by_tokens, more_than_half, by_number, min(len(shared), 1))


def has_empty(ranks: Sequence[Sequence[np.ndarray]]) -> bool:
    """Whether a micro-batch of a rank has no samples."""
    return any(len(samples) == 0 for micro_batches in ranks for samples in micro_batches)


def refuse_empty(ranks: Sequence[Sequence[np.ndarray]]) -> None:
    """Raises a ValueError if a micro-batch of a rank has no samples."""
    if has_empty(ranks):
        num_samples = [sum(map(len, micro_batches)) for micro_batches in ranks]
        raise ValueError(
            f"{len(ranks[0])} micro-batches per rank are needed, and ranks have {num_samples} samples: some "
            "micro-batches would be empty; lower multiple_of or min_count, or use fewer ranks"
        )
