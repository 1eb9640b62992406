"""Keeps to token caps and levels tokens, by the search that levels loads, with both measures exchanged.

Activation memory grows with tokens, and balanced loads are not balanced tokens. Shorter samples have more
tokens for their load, so parts with many short samples have the most. Most placements can level both.
"""

from __future__ import annotations

import numpy as np

from .kernels import ALL, NONE, Limits, Samples, settle, sum_per_part
from .problem import Problem, token_goal

# Percentage of the samples that may leave home in addition, to level tokens.
MORE_MOVED = 4
# During leveling, this many times as many samples may be away from home. Most of them return in the end.
MEANWHILE = 8


def keep_to_tokens(problem: Problem, samples: Samples, part_of: np.ndarray, per_node: int) -> None:
    """Rebalances `part_of` by tokens if a part exceeds `max_tokens`, so that, if possible, no part does."""
    if sum_per_part(problem.tokens, part_of, problem.num_parts).max() > problem.max_tokens:
        by_tokens = problem.by_tokens()
        limits = by_tokens.limits(problem.max_tokens, per_node)
        part_of[:] = _settle(by_tokens, samples, part_of, limits, *ALL)


def level_tokens(
    problem: Problem, samples: Samples, part_of: np.ndarray, target: int, per_node: int = 1
) -> None:
    """Changes `part_of` so that, as far as possible, no part exceeds the tolerance on tokens.

    No part's time ends above the larger of the target and the longest time before. No part gets more tokens
    than the fullest had. If whole samples cannot keep to the tolerance, as with one of eight times the mean,
    the tolerance is relative to a lower bound on the fullest part's tokens instead of the mean.
    """
    tolerance, tokens, num_parts = problem.token_tolerance, problem.tokens, problem.num_parts
    if tolerance is None:
        return
    most = sum_per_part(tokens, part_of, num_parts).max()
    goal = min(token_goal(int(tokens.sum()), num_parts, tolerance), problem.max_tokens)
    if most <= goal:
        return
    by_tokens = problem.by_tokens()
    goal = max(goal, int((1 + tolerance) * by_tokens.shortest_time()))
    if most <= goal:
        return
    loads = problem.limits(max(target, problem.time(part_of))).load
    loads = np.maximum(loads, sum_per_part(samples.work, part_of, num_parts))
    limits = by_tokens.limits(goal, per_node)._replace(other=loads)
    most_moved, has_home = MORE_MOVED * len(part_of) // 100, samples.home != NONE
    for meanwhile in (MEANWHILE * most_moved, most_moved):
        leveled = _settle(by_tokens, samples, part_of, limits, True, 1, meanwhile)
        before, after = (np.count_nonzero(has_home & (samples.home != part)) for part in (part_of, leveled))
        if after <= before + most_moved:
            break
    if sum_per_part(tokens, leveled, num_parts).max() < most:
        part_of[:] = leveled


def _settle(
    by_tokens: Problem, samples: Samples, part_of: np.ndarray, limits: Limits, *steps: int
) -> np.ndarray:
    """Runs `settle` with tokens as work, and work as the other measure. Returns parts, int64 `[samples]`."""
    order = by_tokens.order
    exchanged = Samples(by_tokens.work, samples.work[order], samples.home[order], samples.price[order])
    part = part_of[order]
    settle(exchanged, limits, part, *steps)
    return by_tokens.unsort(part)
