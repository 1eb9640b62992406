"""Even tokens: the search that levels loads, with the two measures exchanged.

Activations follow tokens, and balanced loads are not balanced tokens. Most placements leave room for both: of
two samples, the shorter one has fewer tokens for its load, so parts with many short samples are full.
"""

from __future__ import annotations

import numpy as np

from .kernels import Samples, settle, sum_per_part
from .problem import Problem, token_goal

# Of 100 samples, this many more may leave home.
MORE_MOVED = 4


def level_tokens(
    problem: Problem, samples: Samples, part_of: np.ndarray, target: int, per_node: int = 1
) -> None:
    """Changes `part_of` so that no part has more tokens than the tolerance allows, as far as that can be.

    No part takes longer than the target, or than the slowest did before, nor has more than the fullest had.
    Where whole samples cannot come within the tolerance of the mean, it is that of the least that the fullest
    part can have: of a sample of eight times the mean, say.
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
    order, limits = by_tokens.order, problem.limits(max(target, problem.time(part_of)), per_node)
    limits = limits._replace(
        load=np.full(num_parts, max(goal, 1)),
        other=np.maximum(limits.load, sum_per_part(samples.work, part_of, num_parts)),
    )
    by_amount = Samples(tokens[order], samples.work[order], samples.home[order], samples.price[order])
    part = part_of[order]
    settle(by_amount, limits, part, True, 1, MORE_MOVED * len(part) // 100)
    if sum_per_part(by_amount.work, part, num_parts).max() < most:
        part_of[order] = part
