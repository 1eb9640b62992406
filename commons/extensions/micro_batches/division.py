"""Divides the samples of ranks into micro-batches under a token cap, the same number on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from ...partition import imbalance, refined
from ...partition.kernels import NO_CAP, NONE
from ...partition.problem import Problem, indices_of_parts, number_of_part
from ...partition.refined import place_from_scratch
from ...partition.workloads import as_workloads, check_count
from .packing import (
    TOLERANCE,
    check_samples,
    has_empty,
    least_counts,
    pack,
    refuse_empty,
    report_above_cap,
)

# For fewer micro-batches, a rank fills at most this share of the room beyond the mean rank's tokens. If it is
# fuller, its samples seldom fit into that many micro-batches.
SHARE_OF_SPARE_TOKENS = 0.75
# With more rows per rank than this many times the ranks, placing one row of every rank at a time takes longer
# than dividing rank by rank.
MOST_ROWS_PER_RANK = 4
# Spare room costs 1 to 2% of balance at equal speeds. At unequal speeds, it may cost at most this factor.
_COSTLY = 1.02


def balance_micro_batches(
    workloads: ArrayLike,
    tokens: ArrayLike,
    num_partitions: int,
    max_tokens: int,
    equal_size: bool = True,
    min_count: int = 1,
    *,
    multiple_of: int = 1,
    speeds: ArrayLike | None = None,
    strict: bool = False,
) -> list[list[np.ndarray]]:
    """Places samples on ranks as `refined` does, then divides each rank's samples into micro-batches.

    Every rank gets the same number of micro-batches. If that is more than the tokens need, a placement with a
    cap on a rank's tokens is also tried. It is taken if it needs fewer micro-batches, which costs 1 to 2% of
    balance, but not if unequal speeds make it cost more. If sizes may differ, every micro-batch gets a sample
    if that takes no more micro-batches, whatever the cost in balance.

    Arguments and errors are those of `refined` and `pack_micro_batches`. `multiple_of` and `min_count` apply
    to each rank. Returns the result of `pack_micro_batches` for each rank.
    """
    work, amounts, cap = check_samples(workloads, tokens, max_tokens, multiple_of, min_count)
    multiple_of, min_count = int(multiple_of), int(min_count)
    report_above_cap(amounts, cap, strict)
    # 1. Divide the placement with the best balance.
    partition = refined(workloads, num_partitions, equal_size, speeds=speeds)
    num_ranks = len(partition)
    least = max(-(-int(least_counts(amounts, cap, np.zeros_like(amounts), 1)[0]) // num_ranks), min_count)
    fewest = -(-least // multiple_of) * multiple_of

    def divide(partition: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        rank_of = number_of_part(partition, len(work))
        numbered = number_micro_batches(work, amounts, cap, rank_of, num_ranks, multiple_of, min_count)
        return _in_lists(rank_of, num_ranks, *numbered)

    ranks = divide(partition)
    # 2. Try a placement that leaves ranks some room under their caps.
    if len(ranks[0]) > fewest:
        roomy = _place_with_room(workloads, amounts, cap, partition, fewest, equal_size, speeds)
        if roomy is not None:
            ranks = min(ranks, divide(roomy), key=lambda each: len(each[0]))
    # 3. Try a placement with a sample for each micro-batch.
    if not equal_size and has_empty(ranks):
        rows = min(len(ranks[0]), len(work) // num_ranks)
        problem = replace(Problem.of(workloads, num_ranks, equal_size=False, speeds=speeds), fewest=rows)
        filled = indices_of_parts(problem.unsort(place_from_scratch(problem, 0.0)), num_ranks)
        divided = divide(filled)
        if len(divided[0]) <= len(ranks[0]):
            ranks = divided
    if strict:
        refuse_empty(ranks)
    return ranks


def _place_with_room(
    workloads: ArrayLike,
    tokens: np.ndarray,
    max_tokens: int,
    partition: Sequence[np.ndarray],
    count: int,
    equal_size: bool,
    speeds: ArrayLike | None,
) -> list[np.ndarray] | None:
    """Places samples with spare room in `count` micro-batches per rank. None if that fails or is costly."""
    capped = np.minimum(tokens, max_tokens)
    mean = -(-int(capped.sum()) // len(partition))
    most = mean + int(SHARE_OF_SPARE_TOKENS * (count * max_tokens - mean))
    try:
        roomy = refined(workloads, len(partition), equal_size, tokens=capped, max_tokens=most, speeds=speeds)
    except ValueError:  # no placement was found
        return None
    if speeds is not None:
        allowed = _COSTLY * imbalance(workloads, partition, speeds)
        if imbalance(workloads, roomy, speeds) > allowed:
            return None
    return roomy


def divide_into_micro_batches(
    workloads: ArrayLike, tokens: ArrayLike, partition: Sequence[np.ndarray], max_tokens: int
) -> list[list[np.ndarray]]:
    """Divides samples that are already on ranks as `balance_micro_batches` does, without a warning.

    `partition` holds the indices of each rank's samples. The number of micro-batches is the smallest for
    which a division is found on every rank.

    Raises:
        ValueError: `pack_micro_batches` refuses a value, or `partition` does not hold each sample once.
    """
    check_count("num_partitions", len(partition))
    work, amounts, cap = check_samples(workloads, tokens, max_tokens)
    rank_of = number_of_part(partition, len(work))
    return _in_lists(
        rank_of, len(partition), *number_micro_batches(work, amounts, cap, rank_of, len(partition))
    )


def number_micro_batches(
    work: np.ndarray,
    tokens: np.ndarray,
    max_tokens: int,
    rank_of: np.ndarray,
    num_ranks: int,
    multiple_of: int = 1,
    min_count: int = 1,
    even: bool = True,
) -> tuple[np.ndarray, int]:
    """Divides every rank's samples into the smallest number of micro-batches that is found for all ranks.

    Returns the micro-batch of each sample on its rank, the lightest first, int64 `[samples]`, and the number
    of micro-batches. With `even=False`, any division under the cap will do, which takes less time.
    """
    count = max(min_count, int(least_counts(tokens, max_tokens, rank_of, num_ranks).max()))
    while True:
        count = -(-count // multiple_of) * multiple_of
        number = _divide_longest_first(work, tokens, max_tokens, rank_of, num_ranks, count, even)
        for rank in np.unique(rank_of[number == NONE]).tolist():
            own = np.flatnonzero(rank_of == rank)
            divided = pack(work[own], tokens[own], max_tokens, multiple_of, count)
            if len(divided) > count:
                count = len(divided)
                break
            number[own] = number_of_part(divided, len(own))
        else:
            return number, count


def _in_lists(rank_of: np.ndarray, num_ranks: int, number: np.ndarray, count: int) -> list[list[np.ndarray]]:
    parts = indices_of_parts(rank_of * count + number, num_ranks * count)
    return [parts[start : start + count] for start in range(0, len(parts), count)]


def _divide_longest_first(
    work: np.ndarray,
    tokens: np.ndarray,
    max_tokens: int,
    rank_of: np.ndarray,
    num_ranks: int,
    count: int,
    even: bool,
) -> np.ndarray:
    """Divides all ranks' samples at once into `count` micro-batches. A rank that needs a search gets NONE.

    From the heaviest on, each sample joins the lightest micro-batch of its rank with room for its tokens.
    Before that, each sample above the cap gets an empty micro-batch.
    """
    sizes = np.bincount(rank_of, minlength=num_ranks)
    if sizes.max() > MOST_ROWS_PER_RANK * num_ranks:
        return np.full_like(rank_of, NONE)
    # 1. Line up each rank's samples, first those above the cap, then the heaviest. Fill up with zeros.
    order = np.lexsort((-work, tokens <= max_tokens, rank_of))
    is_real = np.arange(sizes.max()) < sizes[:, None]
    costs, amounts = np.zeros((2, *is_real.shape), dtype=np.int64)
    costs[is_real], amounts[is_real] = work[order], tokens[order]
    # 2. Place one sample of every rank at a time.
    ranks, chosen = np.arange(num_ranks), np.empty_like(costs)
    loads, filled = np.zeros((2, num_ranks, count), dtype=np.int64)
    is_good = np.ones(num_ranks, dtype=bool)
    for column in range(sizes.max()):
        needed = amounts[:, column, None]
        has_room = (filled + needed <= max_tokens) | ((needed > max_tokens) & (filled == 0))
        part = np.where(has_room, loads, NO_CAP).argmin(1)
        is_good &= has_room[ranks, part] | ~is_real[:, column]
        loads[ranks, part] += costs[:, column]
        filled[ranks, part] += amounts[:, column]
        chosen[:, column] = part
    # 3. Keep the divisions that a search could hardly improve.
    if even:
        least = np.maximum(loads.sum(1) / count, costs.max(1, initial=0))
        is_good &= loads.max(1) <= (1 + TOLERANCE) * least
    by_load = np.argsort(np.argsort(loads, axis=1, kind="stable"), axis=1)
    number = np.empty_like(rank_of)
    number[order] = np.where(is_good[:, None], np.take_along_axis(by_load, chosen, 1), NONE)[is_real]
    return number


def micro_batch_imbalance(workloads: ArrayLike, micro_batches: Sequence[Sequence[np.ndarray]]) -> float:
    """Returns the sum over k of the largest load of a k-th micro-batch, ÷ the mean load of a rank.

    This is the relative time of a step whose ranks wait for each other after every micro-batch; 1.0 is
    perfect. Benchmarks and reports use it. Placements do not, because the pipelines here wait once per step.
    Arguments are the `workloads` given to `balance_micro_batches`, and its result.
    """
    values = as_workloads(workloads)
    loads = np.array([[values[indices].sum() for indices in rank] for rank in micro_batches])
    return time_relative_to_mean(loads)


def time_relative_to_mean(loads: np.ndarray) -> float:
    """Returns the `micro_batch_imbalance` of non-negative loads, `[ranks, micro-batches]`."""
    mean = loads.sum(1).mean()
    return float(loads.max(0).sum() / mean) if mean > 0 else 1.0
