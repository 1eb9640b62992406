"""Micro-batches under a token cap: samples are placed on ranks first, then each rank's are divided."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from .balance import imbalance
from .problem import Problem, indices_of_parts, number_of_part
from .refine import place_from_scratch, refine, refined
from .workloads import LOAD_BITS, MOST_TOKENS, as_integers, as_tokens, as_workloads, check_count

# For fewer micro-batches, a rank gets at most this share of the room beyond the mean rank's tokens: packed
# fuller, its samples seldom divide.
SHARE_OF_SPARE_TOKENS = 0.75
# That costs ranks of equal speed 1 to 2%. With others, it must not make a step this many times as long.
_COSTLY = 1.02
# The heaviest micro-batch of a rank is light enough this close above what is possible.
TOLERANCE = 0.005


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
    decreasing by tokens needs, rounded up to the multiple. Where `min_count` suffices, it is that many.

    Args:
        workloads: `[samples]`, non-negative.
        tokens: `[samples]`, whole numbers.
        max_tokens: tokens of a micro-batch at most; at least 1. A sample above it gets a micro-batch of its
            own, and a warning names it.
        multiple_of: the number of micro-batches is a multiple of this.
        min_count: micro-batches at least.
        strict: whether a sample above the cap, or an empty micro-batch, is an error.

    Returns:
        For each micro-batch the ascending int64 indices of its samples, the lightest micro-batch first. One
        is empty only where there are fewer samples than micro-batches.

    Raises:
        ValueError: a value is negative, NaN, or infinite; tokens are not whole numbers; a count is below 1;
            or `strict` refuses a micro-batch.
    """
    check_count("multiple_of", multiple_of)
    check_count("min_count", min_count)
    multiple_of, min_count = int(multiple_of), int(min_count)
    samples = _Samples.of(workloads, tokens, max_tokens)
    samples.report_above_cap(strict)
    ranks = _divide([samples], multiple_of, min_count)
    if strict:
        _refuse_empty(ranks)
    return ranks[0]


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
    check_count("multiple_of", multiple_of)
    check_count("min_count", min_count)
    multiple_of, min_count = int(multiple_of), int(min_count)
    samples = _Samples.of(workloads, tokens, max_tokens)
    samples.report_above_cap(strict)
    # 1. Divide the placement with the best balance.
    partition = refined(workloads, num_partitions, equal_size, speeds=speeds)
    num_ranks = len(partition)
    least = max(-(-samples.fewest() // num_ranks), min_count)
    fewest = -(-least // multiple_of) * multiple_of
    ranks = _divide(samples.on_ranks(partition), multiple_of, min_count)
    # 2. Try one that leaves ranks some room under their caps.
    if len(ranks[0]) > fewest:
        roomy = _place_with_room(workloads, samples, partition, fewest, equal_size, speeds)
        if roomy is not None:
            divided = _divide(samples.on_ranks(roomy), multiple_of, min_count)
            ranks = min(ranks, divided, key=lambda each: len(each[0]))
    # 3. Try one with a sample for each micro-batch.
    if not equal_size and _has_empty(ranks):
        rows = min(len(ranks[0]), len(samples.tokens) // num_ranks)
        problem = replace(Problem.of(workloads, num_ranks, equal_size=False, speeds=speeds), fewest=rows)
        filled = problem.partition(place_from_scratch(problem, 0.0))
        divided = _divide(samples.on_ranks(filled), multiple_of, min_count)
        if len(divided[0]) <= len(ranks[0]):
            ranks = divided
    if strict:
        _refuse_empty(ranks)
    return ranks


def _place_with_room(
    workloads: ArrayLike,
    samples: _Samples,
    partition: Sequence[np.ndarray],
    count: int,
    equal_size: bool,
    speeds: ArrayLike | None,
) -> list[np.ndarray] | None:
    """Places samples so that `count` micro-batches per rank have spare tokens; None if that costs much."""
    capped = np.minimum(samples.tokens, samples.max_tokens)
    mean = -(-int(capped.sum()) // len(partition))
    most = mean + int(SHARE_OF_SPARE_TOKENS * (count * samples.max_tokens - mean))
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
    """As `balance_micro_batches`, of samples that are on ranks, and without a warning.

    `partition` is for each rank the indices of its samples. The number of micro-batches is the smallest for
    which a division is found on every rank.

    Raises:
        ValueError: as `pack_micro_batches`; or `partition` does not hold each sample once.
    """
    check_count("num_partitions", len(partition))
    samples = _Samples.of(workloads, tokens, max_tokens)
    rank_of = number_of_part(partition, len(samples.tokens))
    return _divide(samples.on_ranks(indices_of_parts(rank_of, len(partition))), 1, 1)


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


@dataclass(frozen=True)
class _Samples:
    """Samples to divide, for example those of one rank; `indices` are the caller's, ascending."""

    indices: np.ndarray
    work: np.ndarray
    tokens: np.ndarray
    max_tokens: int

    @staticmethod
    def of(workloads: ArrayLike, tokens: ArrayLike, max_tokens: int) -> _Samples:
        check_count("max_tokens", max_tokens)
        work = as_integers(as_workloads(workloads), LOAD_BITS)
        amounts = as_tokens(tokens, len(work))
        return _Samples(np.arange(len(work)), work, amounts, min(int(max_tokens), MOST_TOKENS))

    def on_ranks(self, partition: Sequence[np.ndarray]) -> list[_Samples]:
        """The samples of each rank."""
        return [_Samples(part, self.work[part], self.tokens[part], self.max_tokens) for part in partition]

    def report_above_cap(self, strict: bool) -> None:
        """Warns of the samples that take a micro-batch of their own, or raises a ValueError."""
        if not self.above.size:
            return
        largest = int(np.argmax(self.tokens))
        fault = (
            f"samples {self.above[:10].tolist()}{' and more' if self.above.size > 10 else ''} have more "
            f"than max_tokens={self.max_tokens} tokens (sample {largest} has {self.tokens[largest]})"
        )
        if strict:
            raise ValueError(f"{fault}: raise max_tokens, or leave them out")
        warnings.warn(
            f"{fault}: each gets a micro-batch of its own, which takes more memory than the cap allows",
            stacklevel=3,
        )

    @cached_property
    def above(self) -> np.ndarray:
        """Positions of the samples above the cap."""
        return np.flatnonzero(self.tokens > self.max_tokens)

    @cached_property
    def others(self) -> np.ndarray:
        """Positions of the samples that share micro-batches."""
        return np.flatnonzero(self.tokens <= self.max_tokens)

    def fewest(self) -> int:
        """Micro-batches that any division needs."""
        tokens = self.tokens[self.others]
        more_than_half = int((2 * tokens > self.max_tokens).sum())  # no two of them fit together
        with_tokens = tokens[tokens > 0]
        most_together = self.max_tokens // int(with_tokens.min(initial=self.max_tokens))
        by_number = -(-len(with_tokens) // most_together)
        return len(self.above) + max(-(-int(tokens.sum()) // self.max_tokens), more_than_half, by_number)

    def divide(self, count: int) -> list[np.ndarray] | None:
        """The caller's indices of each of `count` micro-batches, the lightest first; None if not found."""
        num_shared = count - len(self.above)
        if num_shared < min(len(self.others), 1):
            return None
        shared = self._share(num_shared) if num_shared > 0 else []
        if shared is None:
            return None
        micro_batches = [*self.above[:, None], *(self.others[part] for part in shared)]
        by_load = np.argsort([self.work[samples].sum() for samples in micro_batches], kind="stable")
        return [self.indices[micro_batches[number]] for number in by_load]

    def _share(self, count: int) -> list[np.ndarray] | None:
        """Parts of `others` under the cap with loads as equal as possible; None if not found."""
        work, tokens = self.work[self.others], self.tokens[self.others]
        try:
            return refined(work, count, False, tolerance=TOLERANCE, tokens=tokens, max_tokens=self.max_tokens)
        except ValueError:  # no placement was found
            if self._best_fit.max() >= count:
                return None
            start = indices_of_parts(self._best_fit, count)
            return refine(work, start, TOLERANCE, False, tokens=tokens, max_tokens=self.max_tokens)

    @cached_property
    def _best_fit(self) -> np.ndarray:
        """int64 `[others]`, by best-fit decreasing: each, the largest first, where least room is left."""
        tokens = self.tokens[self.others]
        room = np.full(len(tokens), self.max_tokens)
        part_of = np.empty(len(tokens), dtype=np.int64)
        for sample in np.argsort(-tokens, kind="stable"):
            left = room - tokens[sample]
            part_of[sample] = np.argmin(np.where(left >= 0, left, self.max_tokens + 1))
            room[part_of[sample]] -= tokens[sample]
        return part_of


def _divide(ranks: Sequence[_Samples], multiple_of: int, min_count: int) -> list[list[np.ndarray]]:
    """Divides every rank's samples, into the smallest number of micro-batches that is found for all."""
    fewest = max(1, min_count, *(rank.fewest() for rank in ranks))
    count = -(-fewest // multiple_of) * multiple_of
    while True:
        found: list[list[np.ndarray]] = []
        for rank in ranks:
            micro_batches = rank.divide(count)
            if micro_batches is None:
                break
            found.append(micro_batches)
        else:
            return found
        count += multiple_of


def _has_empty(ranks: Sequence[Sequence[np.ndarray]]) -> bool:
    return any(len(samples) == 0 for micro_batches in ranks for samples in micro_batches)


def _refuse_empty(ranks: Sequence[Sequence[np.ndarray]]) -> None:
    if _has_empty(ranks):
        num_samples = [sum(map(len, micro_batches)) for micro_batches in ranks]
        raise ValueError(
            f"{len(ranks[0])} micro-batches per rank are needed, and ranks have {num_samples} samples: some "
            "micro-batches would be empty; lower multiple_of or min_count, or use fewer ranks"
        )
