"""Rebalancing: balances parts that already have samples, and moves few of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .karmarkar_karp import difference
from .kernels import Samples, settle
from .problem import Problem, in_lists
from .refined import place_from_scratch
from .token_levels import keep_to_tokens, level_tokens
from .workloads import as_integers, as_workloads, check_count, check_each, check_tolerance

# Bits of the sum of all prices of moves. Sums of this many bits, times ACROSS_NODES, stay below 2**63.
PRICE_BITS = 50
# Tolerances on loads: the default, and those allowed if tokens would otherwise exceed `token_tolerance`.
# "What moves cost" decides them.
TOLERANCES = (0.002, 0.005, 0.01)


@in_lists
def rebalance(
    workloads: ArrayLike,
    home: ArrayLike,
    num_partitions: int,
    tolerance: float | None = None,
    sizes: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    *,
    equal_size: bool = True,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
    speeds: ArrayLike | None = None,
    token_tolerance: float | None = None,
) -> np.ndarray:  # `in_lists` makes lists of it
    """Balances parts that already have samples, and moves as few samples as it can.

    Args:
        workloads, num_partitions, equal_size, tokens, max_tokens, speeds: Those of `longest_processing_time`.
        home: Current part of each sample, `[samples]`.
        tolerance: Share by which the largest load may exceed the lower bound. None means 0.002, or 0.005 or
            0.01 if tokens would otherwise exceed `token_tolerance`. If no placement is that close, the
            largest load is about (1 + 1.1 · tolerance) × that of `refined`, and never above that of
            equal-size `karmarkar_karp` under the same limits.
        sizes: Cost of moving each sample, such as its bytes, `[samples]`, non-negative. None means 1 each.
        ranks_per_node: Number of consecutive parts per node. None means 1. Samples leave their node last.
        token_tolerance: Share by which the fullest part's tokens may exceed the mean. Needs `tokens`. At most
            4% of all samples move for that, and no load rises above the largest, or what `tolerance` allows.

    Returns:
        Indices of the samples of each part, int64, ascending. If `home` keeps to the limits, the balance is
        never worse than that of `home`, except as `token_tolerance` allows. If a part of `home` has too many
        samples, its lightest samples leave, and as many of its heaviest as the loads demand.

    Raises:
        ValueError: `longest_processing_time` rejects an argument; `home` is not one part for each sample; a
            tolerance or a size is negative; or `ranks_per_node` is below 1.
    """
    problem = Problem.of(workloads, num_partitions, equal_size, tokens, max_tokens, speeds, token_tolerance)
    first, *for_tokens = TOLERANCES if tolerance is None else (tolerance,)
    return FromHome.of(problem, home, first, sizes, ranks_per_node).parts(for_tokens)


@dataclass(frozen=True)
class FromHome:
    """Samples with homes, the limits of parts, and the time that parts may take."""

    problem: Problem
    samples: Samples  # in the order of `problem`
    tolerance: float
    target: int  # time that the tolerance allows
    per_node: int

    @staticmethod
    def of(
        problem: Problem, home: ArrayLike, tolerance: float, sizes: ArrayLike | None, per_node: int | None
    ) -> FromHome:
        """Checks the arguments of `rebalance` that are not those of `Problem.of`."""
        homes = np.asarray(home)
        num_samples, num_parts = len(problem.work), problem.num_parts
        if homes.shape != (num_samples,) or homes.dtype.kind not in "biuf":
            raise ValueError(f"home has shape {homes.shape} and dtype {homes.dtype}, not one part per sample")
        is_part = (homes >= 0) & (homes < num_parts) & (homes == np.floor(homes))  # NaN compares as False
        check_each("home", homes, is_part, f"a part from 0 to {num_parts - 1}")
        to_move = np.ones(num_samples) if sizes is None else as_workloads(sizes, "sizes", num_samples)
        price = problem.sort(as_integers(to_move, PRICE_BITS))
        samples = Samples(problem.work, problem.tokens, problem.sort(homes), price)
        per_node = 1 if per_node is None else per_node
        check_count("ranks_per_node", per_node)
        tolerance, per_node = check_tolerance(tolerance), min(int(per_node), num_parts)
        return FromHome(problem, samples, tolerance, problem.target_near_home(tolerance), per_node)

    def parts(self, for_tokens: Sequence[float] = ()) -> np.ndarray:
        """Returns each sample's part, int64 `[samples]`, in the caller's order. Tokens may take more time."""
        part_of = self.near_home()
        targets = (self.problem.target_near_home(each) for each in (self.tolerance, *for_tokens))
        level_tokens(self.problem, self.samples, part_of, targets, self.per_node)
        return self.problem.unsort(part_of)

    def near_home(self) -> np.ndarray:
        """Returns parts near home, int64 `[samples]`, within the limits and, if possible, the target."""
        problem, samples, target, per_node = self.problem, self.samples, self.target, self.per_node
        part_of = samples.home.copy()
        keep_to_tokens(problem, samples, part_of, per_node)
        if settle(samples, problem.limits(target, per_node), part_of):
            return part_of
        # The next target is (1 + 1.1 · tolerance) × the time of a partition from scratch, but never above the
        # time of differencing, or of a valid start. Without the extra tenth, the last few swaps would move
        # more samples than all before.
        found = [each for each in (part_of, samples.home) if problem.fault(each) is None]  # home last
        try:
            scratch = [place_from_scratch(problem, 0.0)]
        except ValueError:  # no partition was found under the token cap
            if not found:
                raise
            scratch = []
        attained = min(map(problem.time, scratch or found))
        relaxed = int(min(attained * (1 + 1.1 * self.tolerance), 2.0**61))
        by_differencing = problem.time_within_limits(difference(problem, problem.num_parts))
        relaxed = max(target, min(relaxed, by_differencing, *map(problem.time, found)))
        near = (found or [samples.home])[-1].copy()
        if settle(samples, problem.limits(relaxed, per_node), near):
            return near
        best = min([*found, *scratch], key=problem.time).copy()
        # `best` is within these limits, so its samples only go home. `time` rounds down, as `limits` does.
        settle(samples, problem.limits(max(relaxed, problem.time(best) + 1), per_node), best)
        return best
