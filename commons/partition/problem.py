"""The checked form of a problem: sorted integer workloads, the limits of parts, and the lower bound."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec

import numpy as np
from numpy.typing import ArrayLike

from .kernels import NO_CAP, NONE, Limits, bucket, shortest_time, sum_per_part
from .workloads import as_capped_tokens, as_integers, as_speeds, as_workloads, check_count, check_tolerance

P = ParamSpec("P")

# Loads are sums of int64, exact in any order, so ties do not depend on how a machine adds. With this many
# bits, load × speed and load ÷ speed are exact enough in float64.
LOAD_BITS = 48


@dataclass(frozen=True)
class Problem:
    """Samples from the heaviest to the lightest, and the limits of all parts."""

    speeds: np.ndarray  # float64 [parts], 1.0 for the fastest; the time of a part is its load ÷ its speed
    order: np.ndarray  # int64 [samples], the caller's index of each sample
    work: np.ndarray  # int64 [samples]
    tokens: np.ndarray  # int64 [samples]; zeros if nothing limits tokens
    fewest: int  # smallest number of samples in a part
    most: int  # largest number
    max_tokens: int = NO_CAP  # largest sum of a part's tokens
    token_tolerance: float | None = None  # share by which a part's tokens may exceed the mean

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
        """Checks the arguments, raising the ValueErrors of public functions, and sorts the samples."""
        check_count("num_partitions", num_partitions)
        num_partitions = int(num_partitions)  # a narrow numpy integer would overflow, and recompile
        values = as_workloads(workloads)
        relative = as_speeds(speeds, num_partitions)
        # A key also holds a sample or part number, and a difference of two sums takes one more bit.
        bits = min(LOAD_BITS, 61 - max(len(values), num_partitions).bit_length())
        integers = as_integers(values, bits)
        order = heaviest_first(integers)
        amounts = as_capped_tokens(tokens, max_tokens, token_tolerance, len(values), num_partitions)
        fewest, most = 0, len(values)
        if equal_size:
            fewest, most = len(values) // num_partitions, -(-len(values) // num_partitions)
        cap = NO_CAP if max_tokens is None else min(int(max_tokens), NO_CAP)
        return Problem(relative, order, integers[order], amounts[order], fewest, most, cap, token_tolerance)

    @property
    def num_parts(self) -> int:
        """Number of parts, at least 1."""
        return len(self.speeds)

    def by_tokens(self) -> Problem:
        """Returns the problem of balancing tokens, not work. `order` refers to samples of this problem."""
        order = heaviest_first(self.tokens)
        amounts = self.tokens[order]
        return Problem(np.ones(self.num_parts), order, amounts, 0 * amounts, self.fewest, self.most)

    def sort(self, per_sample: np.ndarray) -> np.ndarray:
        """Reorders per-sample values from the caller's order into the order of `work`, as int64."""
        return np.ascontiguousarray(per_sample, dtype=np.int64)[self.order]

    def unsort(self, per_sample: np.ndarray) -> np.ndarray:
        """Reorders per-sample values from the order of `work` into the caller's order."""
        values = np.empty_like(per_sample)
        values[self.order] = per_sample
        return values

    def target(self, tolerance: float) -> int:
        """Returns the time that the slowest part may take: (1 + tolerance) × the lower bound."""
        bound = self.shortest_time()
        # The time of all work in the slowest part is always enough, and more would overflow.
        most = max(bound, self.work.sum() / self.speeds.min())
        target = max(math.ceil(bound), int(min(bound * (1 + tolerance), most)))
        # `limits` rounds loads down. This much more time makes up for that.
        return target + (int(1 / self.speeds.min()) + 1 if are_unequal(self.speeds) else 0)

    def target_near_home(self, tolerance: float) -> int:
        """Returns `target` with room for samples of no cost, which count as 1, to stay in their parts."""
        return self.target(tolerance) + int(np.count_nonzero(self.work == 1) / self.speeds.min())

    def shortest_time(self) -> float:
        """Returns a lower bound on the time of the slowest part; `lower_bound` gives the proof."""
        return shortest_time(self.work, np.sort(self.speeds), self.fewest, self.most)

    def limits(self, time: int, per_node: int = 1) -> Limits:
        """Returns limits under which no part takes longer than `time`. A node has `per_node` parts."""
        loads = np.maximum(np.minimum((time * self.speeds).astype(np.int64), self.work.sum()), 1)
        nodes = np.arange(self.num_parts) // per_node
        caps = np.full(self.num_parts, self.max_tokens)
        return Limits(loads, caps, nodes, per_node, self.fewest, self.most)

    def time(self, part_of: np.ndarray) -> int:
        """Returns the time of the slowest part. `part_of` is int64 `[samples]`, in the order of `work`."""
        return int((sum_per_part(self.work, part_of, self.num_parts) / self.speeds).max())

    def time_within_limits(self, part_of: np.ndarray) -> int:
        """Returns `time`, or NO_CAP if `fault` finds a fault."""
        return NO_CAP if self.fault(part_of) is not None else self.time(part_of)

    def fault(self, part_of: np.ndarray) -> str | None:
        """Describes a sample without a part, or a broken limit. None means neither. Order as in `work`."""
        if (part_of == NONE).any():
            return f"sample {self.order[np.argmax(part_of == NONE)]} has no part"
        sizes = np.bincount(part_of, minlength=self.num_parts)
        if not self.fewest <= sizes.min() <= sizes.max() <= self.most:
            part = int(np.argmax((sizes < self.fewest) | (sizes > self.most)))
            return f"partition[{part}] has {sizes[part]} samples, expected {self.fewest} to {self.most}"
        amounts = sum_per_part(self.tokens, part_of, self.num_parts)
        if amounts.max() > self.max_tokens:
            part = int(np.argmax(amounts > self.max_tokens))
            return f"partition[{part}] has {amounts[part]} tokens, above max_tokens={self.max_tokens}"
        return None


def heaviest_first(values: np.ndarray) -> np.ndarray:
    """Returns the int64 indices that sort int64 `values` from the largest down. Ties keep their order."""
    if (values[1:] <= values[:-1]).all():  # often true of tokens in the order of work
        return np.arange(len(values))
    digits = len(values).bit_length()
    if values.max(initial=0) >= 2 ** (62 - digits):
        return np.argsort(-values, kind="stable")
    keys = (-values << digits) | np.arange(len(values))
    keys.sort()  # keys have no ties, so no slower stable sort is needed
    return keys & (2**digits - 1)


def are_unequal(speeds: np.ndarray) -> bool:
    """Returns whether some part is slower than the fastest, whose speed is 1."""
    return bool(speeds.min() < 1.0)


def indices_of_parts(part_of: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Returns the ascending int64 indices of each part's samples. `part_of` is int64 `[samples]`."""
    indices, ends = bucket(np.require(part_of, requirements="W"), num_parts)  # numba recompiles if read-only
    bounds = ends.tolist()
    return [indices[start:end] for start, end in zip([0, *bounds], bounds, strict=False)]


def in_lists(place: Callable[P, np.ndarray]) -> Callable[P, list[np.ndarray]]:
    """Turns a function's result, the part of each sample, into lists. Attribute `part_of` is the original."""
    signature = inspect.signature(place)

    @functools.wraps(place)
    def partition(*args: P.args, **kwargs: P.kwargs) -> list[np.ndarray]:
        part_of = place(*args, **kwargs)  # this checks num_partitions
        return indices_of_parts(part_of, int(signature.bind(*args, **kwargs).arguments["num_partitions"]))

    partition.part_of = place  # type: ignore[attr-defined]
    return partition


def number_of_part(partition: Sequence[ArrayLike], num_samples: int) -> np.ndarray:
    """Returns each sample's part, int64 `[samples]`. Raises ValueError unless each is in exactly one part."""
    parts = [np.asarray(part).reshape(-1) for part in partition]
    indices = np.concatenate(parts) if parts else np.empty(0)
    if not np.array_equal(np.sort(indices), np.arange(num_samples)):  # fractions and NaN equal no index
        raise ValueError(
            f"partition has {len(indices)} indices, expected each of the {num_samples} samples once, from 0"
        )
    part_of = np.empty(num_samples, dtype=np.int64)
    part_of[indices.astype(np.int64)] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return part_of


def token_goal(total: int, num_parts: int, tolerance: float) -> int:
    """Returns a part's token goal: (1 + tolerance) × the mean, but at least the mean rounded up."""
    goal = (1 + check_tolerance(tolerance, "token_tolerance")) * (total / num_parts)
    return max(-(-total // num_parts), int(min(goal, NO_CAP)))
