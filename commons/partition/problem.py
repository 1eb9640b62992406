"""The checked form of a problem that the compiled search takes: sorted integer workloads, and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .compiled import compiled
from .search import NO_CAP, Limits, grouped
from .workloads import LOAD_BITS, SPEED_BITS, as_integers, as_workloads, check_count

# Times of slower parts would overflow.
MAX_SPEED_RATIO = 1000
# As float64, sums of tokens below this are exact.
MOST_TOKENS = 2**53


@dataclass(frozen=True)
class Problem:
    """Samples from the heaviest to the lightest, and the limits of every part.

    Attributes:
        speeds: float64 `[parts]`, 1.0 for the fastest.
        order: int64 `[samples]`, the caller's index of each sample.
        work, tokens: int64 `[samples]`; tokens are 0 where nothing caps them.
        limits: of every part.
        token_goal: tokens that a part should have at most; NO_CAP where nothing says so.
    """

    speeds: np.ndarray
    order: np.ndarray
    work: np.ndarray
    tokens: np.ndarray
    limits: Limits
    token_goal: int = NO_CAP

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
        """Checks the arguments and sorts the samples.

        Raises:
            ValueError: a value is negative, NaN, or infinite; `tokens` are not one whole number per sample;
                `tokens` come without a cap or tolerance, or these without `tokens`; no placement can keep to
                the caps; `speeds` are not a number above 0 per part; or `token_tolerance` is not a number of
                at least 0.
        """
        check_count("num_partitions", num_partitions)
        num_partitions = int(num_partitions)  # a narrower numpy integer would overflow, and recompile
        values = as_workloads(workloads)
        of_parts = relative_speeds(speeds, num_partitions)
        are_equal = speeds is None or of_parts.min() == 1
        integers = as_integers(values, LOAD_BITS if are_equal else SPEED_BITS)
        order = np.argsort(-integers)  # not stable, which is much faster
        work = integers[order]
        _sort_ties(order, work)
        amounts = _checked_tokens(tokens, max_tokens, token_tolerance, len(values), num_partitions)
        fewest, most = _row_limits(len(values), num_partitions, equal_size)
        cap = NO_CAP if max_tokens is None else min(int(max_tokens), NO_CAP)
        goal = cap
        if token_tolerance is not None:
            goal = min(cap, token_goal(int(amounts.sum()), num_partitions, token_tolerance))
        return Problem(of_parts, order, work, amounts[order], Limits(fewest, most, cap), goal)

    @property
    def num_parts(self) -> int:
        """Number of parts, at least 1."""
        return len(self.speeds)

    def sorted(self, per_sample: np.ndarray) -> np.ndarray:
        """Values per sample in the caller's order, as int64 in the order of `work`."""
        return np.ascontiguousarray(per_sample, dtype=np.int64)[self.order]

    def partition(self, part_of: np.ndarray) -> list[np.ndarray]:
        """For each part the caller's ascending indices; `part_of` is in the order of `work`."""
        part_of_index = np.empty_like(part_of)
        part_of_index[self.order] = part_of
        return indices_of_parts(part_of_index, self.num_parts)

    def beyond_limits(self, part_of: np.ndarray) -> str | None:
        """The first part that does not keep to the limits, in words; None if all do. Order as of `work`."""
        fewest, most, max_tokens = self.limits
        sizes = np.bincount(part_of, minlength=self.num_parts)
        for part in np.flatnonzero((sizes < fewest) | (sizes > most))[:1]:
            return f"partition[{part}] has {sizes[part]} samples, expected {fewest} to {most}"
        amounts = np.bincount(part_of, self.tokens, minlength=self.num_parts)
        for part in np.flatnonzero(amounts > max_tokens)[:1]:
            return f"partition[{part}] has {int(amounts[part])} tokens, above max_tokens={max_tokens}"
        return None


def relative_speeds(speeds: ArrayLike | None, num_partitions: int) -> np.ndarray:
    """Returns float64 `[parts]`, speeds relative to the fastest; all 1.0 for None.

    Raises:
        ValueError: they are not one finite number above 0 per part, or differ by more than MAX_SPEED_RATIO.
    """
    if speeds is None:
        return np.ones(num_partitions)
    values = np.array(speeds, dtype=np.float64)
    if values.shape != (num_partitions,):
        raise ValueError(f"speeds has shape {values.shape}, expected one for each of {num_partitions} parts")
    is_bad = ~((values > 0) & (values < np.inf))
    if is_bad.any():
        part = int(np.argmax(is_bad))
        raise ValueError(f"speeds[{part}] is {values[part]}, expected a finite number above 0")
    if values.max() > MAX_SPEED_RATIO * values.min():
        raise ValueError(
            f"speeds are {values.min()} to {values.max()}, expected the fastest part to be at most "
            f"{MAX_SPEED_RATIO} times as fast as the slowest"
        )
    return values / values.max()


def indices_of_parts(part_of: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """For each part the ascending int64 indices of its samples; `part_of` int64 `[samples]`."""
    indices, ends = grouped(np.require(part_of, requirements="W"), num_parts)  # else numba compiles anew
    bounds = ends.tolist()
    return [indices[start:end] for start, end in zip([0, *bounds], bounds, strict=False)]


def checked_tolerance(tolerance: float, name: str = "tolerance") -> float:
    """`tolerance`; raises ValueError unless it is a finite number of at least 0."""
    if not 0 <= tolerance < np.inf:
        raise ValueError(f"{name} is {tolerance}, expected a finite number of at least 0")
    return float(tolerance)


def token_goal(total: int, num_parts: int, tolerance: float) -> int:
    """Tokens that a part should have at most: (1 + tolerance) × the mean, which no part need exceed by 1."""
    goal = (1 + checked_tolerance(tolerance, "token_tolerance")) * (total / num_parts)
    return max(-(-total // num_parts), int(min(goal, NO_CAP)))


def number_of_part(partition: Sequence[ArrayLike], num_samples: int) -> np.ndarray:
    """int64 `[samples]`: the part that each sample is in.

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


def whole_tokens(tokens: ArrayLike, num_samples: int) -> np.ndarray:
    """`tokens` as int64 `[samples]`.

    Raises:
        ValueError: they are not one whole number of at least 0 per sample, or too many together.
    """
    amounts = as_workloads(tokens, "tokens")
    if len(amounts) != num_samples:
        raise ValueError(f"tokens has {len(amounts)} values for {num_samples} workloads")
    fractions = np.flatnonzero(amounts != np.floor(amounts))
    if fractions.size:
        raise ValueError(f"tokens[{fractions[0]}] is {amounts[fractions[0]]}, expected a whole number")
    if amounts.sum() >= MOST_TOKENS:
        raise ValueError(f"tokens add up to {amounts.sum():.3g}, expected less than 2**53")
    return amounts.astype(np.int64)


def _checked_tokens(
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
    if max_tokens is None:
        return whole_tokens(tokens, num_samples)
    check_count("max_tokens", max_tokens, minimum=0)
    max_tokens = int(max_tokens)
    amounts = whole_tokens(tokens, num_samples)
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


def _row_limits(num_samples: int, num_partitions: int, equal_size: bool) -> tuple[int, int]:
    """The fewest and the most samples of a part."""
    if equal_size:
        return num_samples // num_partitions, -(-num_samples // num_partitions)
    return 0, num_samples


@compiled
def _sort_ties(order: np.ndarray, work: np.ndarray) -> None:
    """Sorts the indices of samples with equal work."""
    count = len(work)
    place = np.empty(count, dtype=np.int64)  # of the next sample with equal work
    starts = np.empty(count, dtype=np.int64)  # by sample, where those with equal work start
    start = 0
    for at in range(count):
        if work[at] != work[start]:
            start = at
        place[at], starts[order[at]] = at, start
    for sample in range(count):
        start = starts[sample]
        order[place[start]] = sample
        place[start] += 1
