"""The checked form of a problem: sorted integer workloads, limits of every part, and the lower bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .compiled import compiled
from .parts import NO_CAP, NONE, Task, bucket, longest_time, sum_per_part
from .workloads import (
    LOAD_BITS,
    SPEED_BITS,
    as_integers,
    as_speeds,
    as_tokens,
    as_workloads,
    check_count,
    check_tolerance,
)


@dataclass(frozen=True)
class Problem:
    """Samples from the heaviest to the lightest, and what every part may take."""

    speeds: np.ndarray  # float64 [parts], 1.0 for the fastest; the time of a part is its load ÷ its speed
    order: np.ndarray  # int64 [samples], the caller's index of each sample
    work: np.ndarray  # int64 [samples]
    tokens: np.ndarray  # int64 [samples]; 0 where nothing caps them
    fewest: int  # samples of a part
    most: int
    max_tokens: int = NO_CAP  # sum of a part's tokens
    token_goal: int = NO_CAP  # tokens that a part should have at most; NO_CAP where nothing says so

    @staticmethod
    def of(
        workloads: ArrayLike,
        num_partitions: int,
        equal_size: bool = True,
        tokens: ArrayLike | None = None,
        max_tokens: int | None = None,
        speeds: ArrayLike | None = None,
        token_tolerance: float | None = None,
    ) -> Problem:
        """Checks the arguments, which raises the ValueErrors of public functions, and sorts the samples."""
        check_count("num_partitions", num_partitions)
        num_partitions = int(num_partitions)  # a narrower numpy integer would overflow, and recompile
        values = as_workloads(workloads)
        relative = as_speeds(speeds, num_partitions)
        bits = SPEED_BITS if speeds is not None and are_unequal(relative) else LOAD_BITS
        integers = as_integers(values, bits)
        order = np.argsort(-integers)  # not stable, which is much faster
        _sort_ties(order, integers)
        amounts = _check_tokens(tokens, max_tokens, token_tolerance, len(values), num_partitions)
        fewest, most = 0, len(values)
        if equal_size:
            fewest, most = len(values) // num_partitions, -(-len(values) // num_partitions)
        cap = NO_CAP if max_tokens is None else min(int(max_tokens), NO_CAP)
        goal = cap
        if token_tolerance is not None:
            goal = min(cap, token_goal(int(amounts.sum()), num_partitions, token_tolerance))
        return Problem(relative, order, integers[order], amounts[order], fewest, most, cap, goal)

    @property
    def num_parts(self) -> int:
        """Number of parts, at least 1."""
        return len(self.speeds)

    def by_tokens(self) -> Problem:
        """The problem of balancing tokens in place of work; `order` holds samples of this problem."""
        order = np.argsort(-self.tokens, kind="stable")
        amounts, none = self.tokens[order], np.zeros_like(self.tokens)
        return Problem(np.ones(self.num_parts), order, amounts, none, self.fewest, self.most)

    def sort(self, per_sample: np.ndarray) -> np.ndarray:
        """Brings values per sample from the caller's order into that of `work`, as int64."""
        return np.ascontiguousarray(per_sample, dtype=np.int64)[self.order]

    def unsort(self, per_sample: np.ndarray) -> np.ndarray:
        """Brings values per sample from the order of `work` into the caller's."""
        values = np.empty_like(per_sample)
        values[self.order] = per_sample
        return values

    def partition(self, part_of: np.ndarray) -> list[np.ndarray]:
        """For each part the caller's ascending indices; `part_of` is in the order of `work`."""
        return indices_of_parts(self.unsort(part_of), self.num_parts)

    def target(self, tolerance: float) -> int:
        """The time at which the slowest part is fast enough: (1 + tolerance) × the lower bound."""
        bound = self.shortest_time()
        target = max(math.ceil(bound), int(min(bound * (1 + tolerance), 2.0**61)))
        # Loads that a time allows are rounded down. This much more, they are what gave the bound.
        return target + (int(1 / self.speeds.min()) + 1 if are_unequal(self.speeds) else 0)

    def shortest_time(self) -> float:
        """A time that the slowest part takes at least; `lower_bound` gives the proof."""
        return _shortest_time(self.work, np.sort(self.speeds), self.fewest, self.most)

    def within(self, time: int) -> Task:
        """The task of placing samples so that no part takes longer than `time`."""
        initial = initial_loads(self.speeds, time)
        return Task(self.work, self.tokens, initial, time, self.fewest, self.most, self.max_tokens)

    def time(self, part_of: np.ndarray) -> int:
        """The time of the slowest part; `part_of` is int64 `[samples]`, in the order of `work`."""
        return longest_time(sum_per_part(self.work, part_of, self.num_parts), self.speeds)

    def time_within_limits(self, part_of: np.ndarray) -> int:
        """`time`; NO_CAP if a sample has no part, or a part is above `max_tokens`."""
        if part_of[-1] == NONE:
            return NO_CAP
        amounts = sum_per_part(self.tokens, part_of, self.num_parts)
        return NO_CAP if amounts.max() > self.max_tokens else self.time(part_of)

    def fault(self, part_of: np.ndarray) -> str | None:
        """Describes the first part that does not keep to the limits; None if all do. Order as of `work`."""
        sizes = np.bincount(part_of, minlength=self.num_parts)
        for part in np.flatnonzero((sizes < self.fewest) | (sizes > self.most))[:1]:
            return f"partition[{part}] has {sizes[part]} samples, expected {self.fewest} to {self.most}"
        amounts = np.bincount(part_of, self.tokens, minlength=self.num_parts)
        for part in np.flatnonzero(amounts > self.max_tokens)[:1]:
            return f"partition[{part}] has {int(amounts[part])} tokens, above max_tokens={self.max_tokens}"
        return None


@compiled
def _sort_ties(order: np.ndarray, work: np.ndarray) -> None:
    """Sorts the indices of samples with equal work, `[samples]`, in an order of descending work.

    Example: work [5, 7, 5] in the order [1, 2, 0] becomes the order [1, 0, 2].
    """
    place = np.empty(
        len(work), dtype=np.int64
    )  # by sample that starts a run of equal work, the next position
    run_of = np.empty(len(work), dtype=np.int64)
    first = NONE
    for at in range(len(work)):
        if first == NONE or work[order[at]] != work[first]:
            first = order[at]
            place[first] = at
        run_of[order[at]] = first
    for sample in range(len(work)):
        order[place[run_of[sample]]] = sample
        place[run_of[sample]] += 1


def are_unequal(speeds: np.ndarray) -> bool:
    """Whether some part is slower than the fastest, whose speed is 1."""
    return bool(speeds.min() < 1.0)


def initial_loads(speeds: np.ndarray, time: int) -> np.ndarray:
    """Loads in place of speeds, int64 `[parts]`: with them to start from, all parts may come up to `time`.

    Example: in a time of 100, a part of speed 0.8 computes a load of 80. It starts with 20, and like the
    fastest, of speed 1, it is full at 100.
    """
    if not are_unequal(speeds):
        return np.zeros(len(speeds), dtype=np.int64)
    return np.where(speeds < 1.0, time - (time * speeds).astype(np.int64), 0)


def indices_of_parts(part_of: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """For each part the ascending int64 indices of its samples; `part_of` int64 `[samples]`."""
    indices, ends = bucket(np.require(part_of, requirements="W"), num_parts)  # else numba compiles anew
    bounds = ends.tolist()
    return [indices[start:end] for start, end in zip([0, *bounds], bounds, strict=False)]


def number_of_part(partition: Sequence[ArrayLike], num_samples: int) -> np.ndarray:
    """The part that each sample is in, int64 `[samples]`.

    Raises:
        ValueError: `partition` is not each index below `num_samples` once.
    """
    parts = [np.asarray(part).reshape(-1) for part in partition]
    indices = np.concatenate(parts) if parts else np.empty(0)
    if not np.array_equal(np.sort(indices), np.arange(num_samples)):  # fractions and NaN are equal to none
        raise ValueError(
            f"partition has {len(indices)} indices, expected each of the {num_samples} samples once, from 0"
        )
    part_of = np.empty(num_samples, dtype=np.int64)
    part_of[indices.astype(np.int64)] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return part_of


def token_goal(total: int, num_parts: int, tolerance: float) -> int:
    """Tokens that a part should have at most: (1 + tolerance) × the mean, which no part need exceed by 1."""
    goal = (1 + check_tolerance(tolerance, "token_tolerance")) * (total / num_parts)
    return max(-(-total // num_parts), int(min(goal, NO_CAP)))


def _check_tokens(
    tokens: ArrayLike | None,
    max_tokens: int | None,
    token_tolerance: float | None,
    num_samples: int,
    num_partitions: int,
) -> np.ndarray:
    """int64 `[samples]`, in the caller's order."""
    if tokens is None:
        for name, value in (("max_tokens", max_tokens), ("token_tolerance", token_tolerance)):
            if value is not None:
                raise ValueError(f"{name} is given without tokens")
        return np.zeros(num_samples, dtype=np.int64)
    if max_tokens is None and token_tolerance is None:
        raise ValueError("tokens is given without max_tokens, or token_tolerance where there is one")
    if max_tokens is not None:
        check_count("max_tokens", max_tokens, minimum=0)
    amounts = as_tokens(tokens, num_samples)
    if max_tokens is None:
        return amounts
    max_tokens = int(max_tokens)
    over = np.flatnonzero(amounts > max_tokens)
    if over.size:
        raise ValueError(
            f"tokens[{over[0]}] is {int(amounts[over[0]])}, above max_tokens={max_tokens}: it fits nowhere"
        )
    if amounts.sum() > num_partitions * max_tokens:
        raise ValueError(
            f"max_tokens={max_tokens} is too small: {num_partitions} parts hold at most "
            f"{num_partitions * max_tokens} tokens, the samples have {int(amounts.sum())}"
        )
    return amounts


@compiled
def _shortest_time(work: np.ndarray, speeds: np.ndarray, fewest: int, most: int) -> float:
    """`Problem.shortest_time`, given ascending speeds."""
    num_samples, num_parts = len(work), len(speeds)
    sums = np.zeros(num_samples + 1, dtype=np.int64)  # of the heaviest samples
    for sample in range(num_samples):
        sums[sample + 1] = sums[sample] + work[sample]
    # 1. The q fastest parts together, at q − 1; all of them give the mean.
    fastest = np.empty(num_parts)
    fastest[0] = speeds[num_parts - 1]
    for q in range(1, num_parts):
        fastest[q] = fastest[q - 1] + speeds[num_parts - 1 - q]
    bound = sums[num_samples] / fastest[num_parts - 1]
    # 2. Some q parts hold j · q of the m heaviest samples, and the lightest ones up to their sizes.
    for before in range(0, num_samples, num_parts):
        j = before // num_parts + 1
        for q in range(1, min(num_parts, num_samples - before) + 1):
            m, others = before + q, max(fewest - j, 0) * q
            load = sums[m] - sums[m - j * q] + sums[num_samples] - sums[num_samples - others]
            if load > bound * fastest[q - 1]:
                bound = load / fastest[q - 1]
    # 3. The q slowest parts hold the lightest samples at least, as many as sizes demand.
    slowest = 0.0
    for q in range(1, num_parts if speeds[0] < 1.0 else 0):
        slowest += speeds[q - 1]
        rows = max(q * fewest, num_samples - (num_parts - q) * most)
        bound = max(bound, (sums[num_samples] - sums[num_samples - rows]) / slowest)
    return bound
