"""Micro-batches under a token cap: within one rank, and of many ranks together."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from commons.partition.micro_batch_search import arrange
from commons.partition.parts import NONE
from commons.partition.problem import Problem, number_of_part, whole_tokens
from commons.partition.refine import refined
from commons.partition.workloads import as_workloads, check_count

# Places samples on ranks, each with at most so many of the given tokens `[samples]`, both None for no limit;
# raises ValueError if it finds no such placement.
PlaceOnRanks = Callable[[np.ndarray | None, int | None], Sequence[np.ndarray]]

# Of the tokens that ranks have room for beyond the mean rank's, these shares are tried as a limit: the less a
# rank may have, the easier its samples divide into micro-batches, and the harder ranks are to balance.
SHARES_OF_SPARE_TOKENS = (0.25, 0.5, 0.75, 1.0, 0.0)
# With more samples, the first limit under which they divide is taken, from the widest: of many ranks' samples
# micro-batches match well enough, and narrow limits take seconds.
THOROUGH_UP_TO = 1024
# Balance of the ranks comes first, but so much of it is given for micro-batches that match.
RANK_TOLERANCE = 0.01
# No cap holds more: all tokens together are fewer.
MAX_TOKENS = 2**53
# Micro-batches that match so nearly, relative to the lower bound, are not bettered.
ENOUGH_ABOVE_BOUND = 0.05


def pack_micro_batches(
    workloads: ArrayLike,
    tokens: ArrayLike,
    max_tokens: int,
    multiple_of: int = 1,
    min_count: int = 1,
) -> list[np.ndarray]:
    """Divides samples into few micro-batches under a token cap, with loads as equal as possible.

    A sample above the cap gets a micro-batch of its own, and a warning names it: the only exception. The
    number of micro-batches is the smallest for which a division is found: never more than best-fit decreasing
    by tokens needs, rounded up to the multiple.

    Args:
        workloads: `[samples]`, non-negative.
        tokens: `[samples]`, whole numbers.
        max_tokens: of a micro-batch, at least 1.
        multiple_of: the number of micro-batches is a multiple of this.
        min_count: and at least this.

    Returns:
        For each micro-batch the ascending int64 indices of its samples, the lightest micro-batch first; empty
        ones where there are fewer samples than micro-batches. Equal input gives equal output on every
        machine.

    Raises:
        ValueError: a value is negative, NaN or infinite, tokens are no whole numbers, or a count is below 1.
    """
    check_count("multiple_of", multiple_of)
    samples = _Samples.of(workloads, tokens, max_tokens, num_ranks=1)
    samples.warn_of_samples_above_cap(stacklevel=3)
    everything = np.zeros(len(samples.work), dtype=np.int64)
    return samples.smallest(everything, multiple_of, min_count).indices(samples)[0]


def balance_micro_batches(
    workloads: ArrayLike,
    tokens: ArrayLike,
    num_partitions: int,
    max_tokens: int,
    equal_size: bool = True,
    min_count: int = 1,
) -> list[list[np.ndarray]]:
    """Places samples on ranks and divides each rank's into micro-batches, the same number on every rank.

    Balanced are the ranks, as `refined` does; and, among placements that are within 1 % of the best of them
    in that, what the k-th micro-batches take together, where ranks wait for each other after every one: the
    sum over k of the largest k-th load. The number is the smallest for which a placement is found.

    Args:
        workloads: `[samples]`, non-negative.
        tokens: `[samples]`, whole numbers.
        num_partitions: ranks, at least 1.
        max_tokens: of a micro-batch, at least 1; a sample above it gets a micro-batch of its own, and a
            warning names it.
        equal_size: whether numbers of samples per rank differ by at most one.
        min_count: micro-batches of a rank at least.

    Returns:
        For each rank and micro-batch the ascending int64 indices of its samples; of every rank the lightest
        micro-batch first.

    Raises:
        ValueError: as `pack_micro_batches` does.
    """

    def place(capped: np.ndarray | None, most: int | None) -> Sequence[np.ndarray]:
        return refined(workloads, num_partitions, equal_size, tokens=capped, max_tokens=most)

    _Samples.of(workloads, tokens, max_tokens, num_partitions).warn_of_samples_above_cap(stacklevel=3)
    return place_in_micro_batches(workloads, tokens, num_partitions, max_tokens, place, min_count)


def place_in_micro_batches(
    workloads: ArrayLike,
    tokens: ArrayLike,
    num_partitions: int,
    max_tokens: int,
    place: PlaceOnRanks,
    min_count: int = 1,
) -> list[list[np.ndarray]]:
    """`balance_micro_batches` with another way to place samples on ranks, and without a warning.

    Raises:
        ValueError: also what `place` raises where it has no limit to keep to.
    """
    check_count("min_count", min_count)
    samples = _Samples.of(workloads, tokens, max_tokens, num_partitions)
    thorough = len(samples.work) <= THOROUGH_UP_TO
    without_limit = place(None, None)
    if len(without_limit) != num_partitions:
        raise ValueError(f"place returned {len(without_limit)} parts, expected {num_partitions}")
    free = samples.in_order(number_of_part(without_limit, len(samples.work)))
    most_load = (1 + RANK_TOLERANCE) * samples.largest_rank(free)
    count = max(samples.fewest(), int(min_count))
    while True:
        found: list[_Arranged] = []
        most_time = (1 + ENOUGH_ABOVE_BOUND) * samples.bound(count)
        for rank_of in itertools.chain([free], samples.placements(place, count, thorough)):
            arranged = samples.arranged(rank_of, count)
            if arranged is not None:
                found.append(arranged)
                is_good = arranged.time <= most_time and arranged.largest_rank <= most_load
                if is_good or not thorough:
                    break
        if found:
            return _best(found).indices(samples)
        count += 1


def divide_into_micro_batches(
    workloads: ArrayLike,
    tokens: ArrayLike,
    partition: Sequence[np.ndarray],
    max_tokens: int,
) -> list[list[np.ndarray]]:
    """`place_in_micro_batches` where samples are on their ranks already: `partition` has those of each.

    Raises:
        ValueError: also if `partition` is none of these samples.
    """
    samples = _Samples.of(workloads, tokens, max_tokens, len(partition))
    rank_of = samples.in_order(number_of_part(partition, len(samples.work)))
    return samples.smallest(rank_of, 1, 1).indices(samples)


def small_at_both_ends(micro_batches: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Micro-batches that come the lightest first, in the order 1st, 3rd, 5th, …, 6th, 4th, 2nd.

    Pipeline-parallel schedules fill and drain with their first and last micro-batches.
    """
    return [*micro_batches[::2], *micro_batches[1::2][::-1]]


def micro_batch_imbalance(workloads: ArrayLike, micro_batches: Sequence[Sequence[np.ndarray]]) -> float:
    """Sum over k of the largest k-th load of any rank ÷ mean load of a rank: what steps take together whose
    ranks wait for each other after every micro-batch; 1.0 is perfect.

    Args:
        workloads: `[samples]`, non-negative.
        micro_batches: for each rank and micro-batch the indices of its samples, as many on every rank.
    """
    values = as_workloads(workloads)
    loads = np.array([[values[indices].sum() for indices in of_rank] for of_rank in micro_batches])
    return time_relative_to_mean(loads)


def time_relative_to_mean(loads: np.ndarray) -> float:
    """`micro_batch_imbalance` of non-negative loads `[ranks, micro-batches]`."""
    mean = loads.sum(1).mean()
    return float(loads.max(0).sum() / mean) if mean > 0 else 1.0


def micro_batch_lower_bound(
    workloads: ArrayLike, tokens: ArrayLike, num_partitions: int, count: int, max_tokens: int
) -> float:
    """A `micro_batch_imbalance` that no division into `count` micro-batches per rank beats.

    Order the k by their largest loads. The first j − 1 of them hold at most as many tokens as their caps
    allow, so the j-th takes at least the first of the heaviest samples that does not fit into these. And what
    the first j can hold is at most what the samples with the most work per token come to, cut to the caps:
    the rest is shared by all ranks behind them. The bound is the largest over j.

    Raises:
        ValueError: as `pack_micro_batches` does.
    """
    check_count("count", count)
    samples = _Samples.of(workloads, tokens, max_tokens, num_partitions)
    total = int(samples.work.sum())
    return max(1.0, samples.bound(count) * num_partitions / total) if total else 1.0


@dataclass(frozen=True)
class _Arranged:
    """Micro-batches of all ranks.

    Attributes:
        rank_of: int64 `[samples]`, in the order of the problem.
        micro_batch_of: int64 `[samples]`, likewise.
        loads: int64 `[ranks, count]`, ascending for each rank.
    """

    rank_of: np.ndarray
    micro_batch_of: np.ndarray
    loads: np.ndarray

    @property
    def largest_rank(self) -> int:
        """Load of the slowest rank, if ranks wait for each other once."""
        return int(self.loads.sum(1).max())

    @property
    def time(self) -> int:
        """Load of the slowest ranks, if ranks wait for each other after every micro-batch."""
        return int(self.loads.max(0).sum())

    def indices(self, samples: _Samples) -> list[list[np.ndarray]]:
        """For each rank and micro-batch the caller's ascending indices."""
        num_ranks, count = self.loads.shape
        parts = samples.partition(self.rank_of * count + self.micro_batch_of, num_ranks * count)
        return [parts[rank * count : (rank + 1) * count] for rank in range(num_ranks)]


def _best(found: Sequence[_Arranged]) -> _Arranged:
    """The one whose k-th micro-batches match best, of those whose ranks are nearly as balanced as any's."""
    least = min(arranged.largest_rank for arranged in found)
    near = [arranged for arranged in found if arranged.largest_rank <= (1 + RANK_TOLERANCE) * least]
    return min(near, key=lambda arranged: arranged.time)


@dataclass(frozen=True)
class _Samples:
    """Samples to be divided, from the heaviest to the lightest.

    Attributes:
        problem: the order of the samples, and the ranks.
        tokens: int64 `[samples]`.
        max_tokens: of a micro-batch.
    """

    problem: Problem
    tokens: np.ndarray
    max_tokens: int

    @staticmethod
    def of(workloads: ArrayLike, tokens: ArrayLike, max_tokens: int, num_ranks: int) -> _Samples:
        check_count("max_tokens", max_tokens)
        problem = Problem.of(workloads, num_ranks, equal_size=False)
        amounts = problem.sorted(whole_tokens(tokens, len(problem.work)))
        return _Samples(problem, amounts, min(int(max_tokens), MAX_TOKENS))

    @property
    def work(self) -> np.ndarray:
        """int64 `[samples]`, descending."""
        return self.problem.work

    @property
    def capped(self) -> np.ndarray:
        """int64 `[samples]`: tokens, but of one above the cap those of the micro-batch that it takes."""
        return np.minimum(self.tokens, self.max_tokens)

    def in_order(self, per_sample: np.ndarray) -> np.ndarray:
        """Something of each sample, from the caller's order to that of `work`."""
        return self.problem.sorted(per_sample)

    def partition(self, part_of: np.ndarray, num_parts: int) -> list[np.ndarray]:
        """For each part the caller's ascending indices; `part_of` is in the order of `work`."""
        return self.problem.partition(part_of, num_parts)

    def largest_rank(self, rank_of: np.ndarray) -> int:
        """The largest load of a rank."""
        loads = np.zeros(self.problem.num_parts, dtype=np.int64)
        np.add.at(loads, rank_of, self.work)
        return int(loads.max())

    def fewest(self) -> int:
        """Micro-batches that every rank needs at least."""
        alone = int((self.tokens > self.max_tokens).sum())
        others = self.tokens[self.tokens <= self.max_tokens]
        more_than_half = int((2 * others > self.max_tokens).sum())  # no two of them fit together
        with_tokens = others[others > 0]
        most_together = self.max_tokens // int(with_tokens.min(initial=self.max_tokens))
        by_number = -(-len(with_tokens) // most_together)
        together = alone + max(-(-int(others.sum()) // self.max_tokens), more_than_half, by_number)
        return max(-(-together // self.problem.num_parts), 1)

    def bound(self, count: int) -> float:
        """What `_Arranged.time` is at least; `micro_batch_lower_bound` says why."""
        num_ranks, work, capped = self.problem.num_parts, self.work, self.capped
        total, room = int(work.sum()), num_ranks * self.max_tokens  # room of the k-th ones together
        heaviest_tokens = np.cumsum(capped)
        work_per_token = np.full(len(work), np.inf)  # what has no tokens fits everywhere
        np.divide(work, capped, out=work_per_token, where=capped > 0)
        densest = np.argsort(-work_per_token, kind="stable")
        dense_work, dense_tokens = np.cumsum(work[densest]), np.cumsum(capped[densest])
        bound, largest = total / num_ranks, 0
        for j in range(count):
            left_out = int(np.searchsorted(heaviest_tokens, j * room, side="right")) if j else 0
            largest += int(work[left_out]) if left_out < len(work) else 0
            cut = int(np.searchsorted(dense_tokens, (j + 1) * room, side="right"))
            held = int(dense_work[cut - 1]) if cut else 0
            if cut < len(work):
                of_cut = densest[cut]
                space = (j + 1) * room - (int(dense_tokens[cut - 1]) if cut else 0)
                held += int(work[of_cut]) * space // int(capped[of_cut]) + 1
            bound = max(bound, largest + (total - held) / num_ranks)
        return bound

    def arranged(self, rank_of: np.ndarray, count: int) -> _Arranged | None:
        """`count` micro-batches on every rank; None if none were found."""
        micro_batch_of, loads = arrange(
            self.work, self.tokens, rank_of, self.problem.num_parts, count, self.max_tokens
        )
        found = len(self.work) == 0 or micro_batch_of[0] != NONE
        return _Arranged(rank_of, micro_batch_of, loads) if found else None

    def smallest(self, rank_of: np.ndarray, multiple_of: int, min_count: int) -> _Arranged:
        """As few micro-batches as are found."""
        check_count("min_count", min_count)
        multiple_of, min_count = int(multiple_of), int(min_count)  # numpy integers could overflow
        count = -(-max(self.fewest(), min_count) // multiple_of) * multiple_of
        while (arranged := self.arranged(rank_of, count)) is None:
            count += multiple_of
        return arranged

    def placements(self, place: PlaceOnRanks, count: int, thorough: bool) -> Iterator[np.ndarray]:
        """int64 `[samples]`, the rank of each: placements under several limits of a rank's tokens."""
        capped = np.empty_like(self.tokens)
        capped[self.problem.order] = self.capped
        room, mean = count * self.max_tokens, -(-int(capped.sum()) // self.problem.num_parts)
        shares = SHARES_OF_SPARE_TOKENS if thorough else sorted(SHARES_OF_SPARE_TOKENS, reverse=True)
        for share in shares if self.problem.num_parts > 1 else ():
            try:
                partition = place(capped, mean + int((room - mean) * share))
            except ValueError:  # not found
                continue
            yield self.in_order(number_of_part(partition, len(self.work)))

    def warn_of_samples_above_cap(self, stacklevel: int) -> None:
        """Names the samples that take a micro-batch of their own."""
        above = np.sort(self.problem.order[self.tokens > self.max_tokens])
        if above.size:
            largest = int(self.problem.order[np.argmax(self.tokens)])
            warnings.warn(
                f"samples {above[:10].tolist()}{' and more' if above.size > 10 else ''} have more than "
                f"max_tokens={self.max_tokens} tokens (sample {largest} has {int(self.tokens.max())}): each "
                "gets a micro-batch of its own, which takes more memory than the cap allows",
                stacklevel=stacklevel,
            )
