"""Division of samples on ranks into micro-batches under a cap of tokens: as many on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from ...partition import imbalance, refined
from ...partition.kernels import NO_CAP
from ...partition.packing import (
    TOLERANCE,
    check_samples,
    has_empty,
    least_count,
    pack,
    refuse_empty,
    report_above_cap,
)
from ...partition.problem import Problem, indices_of_parts, number_of_part
from ...partition.refined import place_from_scratch
from ...partition.workloads import as_workloads, check_count

# For fewer micro-batches, a rank gets at most this share of the room beyond the mean rank's tokens: packed
# fuller, its samples seldom divide.
SHARE_OF_SPARE_TOKENS = 0.75
# With more rows per rank than this many times the ranks, it takes longer to place one of each at a time than
# to divide rank by rank.
MOST_ROWS_PER_RANK = 4
# That costs ranks of equal speed 1 to 2%. With others, it must not make a step this many times as long.
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
    """Places samples on ranks as `refined` does, then divides each rank's into micro-batches.

    Every rank gets the same number of micro-batches. Where that is more than the tokens need, a placement
    with a cap on the tokens of a rank is tried, too. It is taken if it needs fewer, and costs 1 to 2% of
    balance; not where speeds differ and it costs more. With unequal sizes, ranks get a sample for each
    micro-batch where that takes no more micro-batches, whatever it costs in balance.

    Arguments and errors are those of `refined` and `pack_micro_batches`; `multiple_of` and `min_count` are of
    a rank. Returns what the latter does for each rank.
    """
    work, amounts, cap = check_samples(workloads, tokens, max_tokens, multiple_of, min_count)
    multiple_of, min_count = int(multiple_of), int(min_count)
    report_above_cap(amounts, cap, strict)
    # 1. Divide the placement with the best balance.
    partition = refined(workloads, num_partitions, equal_size, speeds=speeds)
    num_ranks = len(partition)
    least = max(-(-least_count(amounts, cap) // num_ranks), min_count)
    fewest = -(-least // multiple_of) * multiple_of
    ranks = _divide(work, amounts, cap, partition, multiple_of, min_count)
    # 2. Try one that leaves ranks some room under their caps.
    if len(ranks[0]) > fewest:
        roomy = _place_with_room(workloads, amounts, cap, partition, fewest, equal_size, speeds)
        if roomy is not None:
            divided = _divide(work, amounts, cap, roomy, multiple_of, min_count)
            ranks = min(ranks, divided, key=lambda each: len(each[0]))
    # 3. Try one with a sample for each micro-batch.
    if not equal_size and has_empty(ranks):
        rows = min(len(ranks[0]), len(work) // num_ranks)
        problem = replace(Problem.of(workloads, num_ranks, equal_size=False, speeds=speeds), fewest=rows)
        filled = indices_of_parts(problem.unsort(place_from_scratch(problem, 0.0)), num_ranks)
        divided = _divide(work, amounts, cap, filled, multiple_of, min_count)
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
    """Places samples so that `count` micro-batches per rank have spare tokens; None if that costs much."""
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
    """Divides samples that are on ranks as `balance_micro_batches` does, without a warning.

    `partition` is for each rank the indices of its samples. The number of micro-batches is the smallest for
    which a division is found on every rank.

    Raises:
        ValueError: as `pack_micro_batches`; or `partition` does not hold each sample once.
    """
    check_count("num_partitions", len(partition))
    work, amounts, cap = check_samples(workloads, tokens, max_tokens)
    rank_of = number_of_part(partition, len(work))
    return _divide(work, amounts, cap, indices_of_parts(rank_of, len(partition)), 1, 1)


def _divide(
    work: np.ndarray,
    tokens: np.ndarray,
    max_tokens: int,
    partition: Sequence[np.ndarray],
    multiple_of: int,
    min_count: int,
) -> list[list[np.ndarray]]:
    """Divides every rank's samples, into the smallest number of micro-batches that is found for all."""
    ranks: list[list[np.ndarray]] = [[] for _ in partition]
    count = max(min_count, *(least_count(tokens[part], max_tokens) for part in partition))
    while any(len(rank) < count for rank in ranks):
        quick = _divide_longest_first(
            work, tokens, max_tokens, partition, -(-count // multiple_of) * multiple_of
        )
        for number, part in enumerate(partition):
            if len(ranks[number]) < count:
                ranks[number] = quick[number]
            if len(ranks[number]) < count:
                divided = pack(work[part], tokens[part], max_tokens, multiple_of, count)
                ranks[number] = [part[samples] for samples in divided]
            count = max(count, len(ranks[number]))
    return ranks


def _divide_longest_first(
    work: np.ndarray, tokens: np.ndarray, max_tokens: int, partition: Sequence[np.ndarray], count: int
) -> list[list[np.ndarray]]:
    """Divides all ranks' samples at once into `count` micro-batches; none for a rank that needs a search.

    Each sample, a rank's heaviest first, goes where the least work is, of those with room for its tokens.
    """
    rows = max(map(len, partition))
    if rows > MOST_ROWS_PER_RANK * len(partition):
        return [[] for _ in partition]
    # 1. A row for each rank, of its samples from the heaviest on, and then of nothing.
    is_real = np.arange(rows) < np.array([len(part) for part in partition])[:, None]
    sample = np.zeros(is_real.shape, dtype=np.int64)
    sample[is_real] = np.concatenate(partition)
    order = np.argsort(np.where(is_real, -work[sample], 1), axis=1, kind="stable")
    sample = np.take_along_axis(sample, order, 1)
    costs, amounts = work[sample] * is_real, tokens[sample] * is_real
    # 2. Place a sample of every rank at a time.
    ranks, chosen = np.arange(len(partition)), np.empty_like(sample)
    loads, filled = np.zeros((2, len(partition), count), dtype=np.int64)
    for column in range(rows):
        has_room = filled + amounts[:, column, None] <= max_tokens
        part = np.where(has_room, loads, NO_CAP).argmin(1)
        loads[ranks, part] += costs[:, column]
        filled[ranks, part] += amounts[:, column]
        chosen[:, column] = part
    # 3. Keep what a search could hardly improve.
    least = np.maximum(loads.sum(1) / count, costs.max(1, initial=0))
    is_good = (filled.max(1) <= max_tokens) & (loads.max(1) <= (1 + TOLERANCE) * least)
    by_load = np.argsort(np.argsort(loads, axis=1, kind="stable"), axis=1)
    number = ranks[:, None] * count + np.take_along_axis(by_load, chosen, 1)
    part_of = np.empty_like(work)
    part_of[sample[is_real]] = number[is_real]
    parts = indices_of_parts(part_of, len(partition) * count)
    return [parts[rank * count : (rank + 1) * count] if is_good[rank] else [] for rank in ranks]


def micro_batch_imbalance(workloads: ArrayLike, micro_batches: Sequence[Sequence[np.ndarray]]) -> float:
    """Sum over k of the largest k-th load of any rank ÷ mean load of a rank; 1.0 is perfect.

    This is the relative time of a step whose ranks wait for each other after every micro-batch. Benchmarks
    and `BalanceReport` use it; no placement does, because pipelines here wait once a step. Arguments are one
    of `balance_micro_batches`, and its result.
    """
    values = as_workloads(workloads)
    loads = np.array([[values[indices].sum() for indices in rank] for rank in micro_batches])
    return time_relative_to_mean(loads)


def time_relative_to_mean(loads: np.ndarray) -> float:
    """`micro_batch_imbalance` of non-negative loads `[ranks, micro-batches]`."""
    mean = loads.sum(1).mean()
    return float(loads.max(0).sum() / mean) if mean > 0 else 1.0
