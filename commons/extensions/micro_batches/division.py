"""Division of samples on ranks into micro-batches under a cap of tokens: as many on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from ...partition import imbalance, refined
from ...partition.packing import (
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
        for number, part in enumerate(partition):
            if len(ranks[number]) < count:
                divided = pack(work[part], tokens[part], max_tokens, multiple_of, count)
                ranks[number] = [part[samples] for samples in divided]
                count = len(divided)
    return ranks


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
