"""Keeps to token caps and levels tokens, by the search that levels loads, with both measures exchanged.

Activation memory grows with tokens, and balanced loads are not balanced tokens. Shorter samples have more
tokens for their load, so parts with many short samples have the most. Most placements can level both.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .kernels import Samples, level, settle, sum_per_part
from .problem import Problem, token_goal

# Percentage of samples that may also leave home for tokens. At 1, some ranks keep 1.6 × the mean (lognormal).
MORE_MOVED = 4


def keep_to_tokens(problem: Problem, samples: Samples, part_of: np.ndarray, per_node: int) -> None:
    """Rebalances `part_of` by tokens if a part exceeds `max_tokens`, so that, if possible, no part does."""
    if sum_per_part(problem.tokens, part_of, problem.num_parts).max() > problem.max_tokens:
        by_tokens = problem.by_tokens()
        part = part_of[by_tokens.order]
        settle(_exchanged(by_tokens, samples), by_tokens.limits(problem.max_tokens, per_node), part)
        part_of[:] = by_tokens.unsort(part)


def level_tokens(
    problem: Problem, samples: Samples, part_of: np.ndarray, targets: Iterable[int], per_node: int = 1
) -> None:
    """Changes `part_of` so that, as far as possible, no part exceeds the tolerance on tokens.

    Tries `targets` for the time of parts, ascending, until tokens keep to the tolerance. No part's time ends
    above the larger of the target and the longest time before. No part gets more tokens than the fullest had.
    If whole samples cannot keep to the tolerance, as with one of eight times the mean, the tolerance is
    relative to a lower bound on the fullest part's tokens instead of the mean.
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
    loads, time = sum_per_part(samples.work, part_of, num_parts), problem.time(part_of)
    exchanged, best = _exchanged(by_tokens, samples), part_of
    for target in targets:
        if most <= goal:
            break
        most_load = np.maximum(problem.limits(max(target, time)).load, loads)
        limits = by_tokens.limits(goal, per_node)._replace(other=most_load)
        part = part_of[by_tokens.order]
        level(exchanged, limits, part, MORE_MOVED * len(part) // 100)
        leveled = by_tokens.unsort(part)
        reached = sum_per_part(tokens, leveled, num_parts).max()
        if reached < most:
            best, most = leveled, reached
    part_of[:] = best


def _exchanged(by_tokens: Problem, samples: Samples) -> Samples:
    """Returns the samples in the order of `by_tokens`, with tokens as work, and work as the other measure."""
    order = by_tokens.order
    return Samples(by_tokens.work, samples.work[order], samples.home[order], samples.price[order])
