"""A lower bound on the time of a step whose ranks wait for each other after every micro-batch."""

from __future__ import annotations

import numpy as np


def micro_batch_lower_bound(
    workloads: np.ndarray, tokens: np.ndarray, num_ranks: int, count: int, max_tokens: int
) -> float:
    """A `micro_batch_imbalance` that no division into `count` micro-batches per rank beats.

    Order the k by their largest loads. The first j − 1 of them hold at most as many tokens as their caps
    allow, so the j-th takes at least the heaviest sample that does not fit into these. And the first j
    together can hold at most the work of the samples with the most work per token, cut to the caps: all ranks
    share the rest after them. The bound is the largest over j.

    Args:
        workloads, tokens: `[samples]`, non-negative; tokens are whole numbers.
        num_ranks, count: ranks, and micro-batches of each; at least 1.
        max_tokens: tokens of a micro-batch at most; a sample above it is alone in one.
    """
    order = np.argsort(-np.asarray(workloads, dtype=np.float64), kind="stable")
    work = np.asarray(workloads, dtype=np.float64)[order]
    capped = np.minimum(np.asarray(tokens, dtype=np.int64), max_tokens)[order]
    total, room = float(work.sum()), num_ranks * max_tokens  # room of the k-th ones together
    if total == 0:
        return 1.0
    heaviest_tokens = np.cumsum(capped)
    work_per_token = np.full(len(work), np.inf)  # a sample without tokens fits everywhere
    np.divide(work, capped, out=work_per_token, where=capped > 0)
    densest = np.argsort(-work_per_token, kind="stable")
    dense_work, dense_tokens = np.cumsum(work[densest]), np.cumsum(capped[densest])
    bound, largest = total / num_ranks, 0.0
    for j in range(count):
        left_out = int(np.searchsorted(heaviest_tokens, j * room, side="right")) if j else 0
        largest += float(work[left_out]) if left_out < len(work) else 0.0
        cut = int(np.searchsorted(dense_tokens, (j + 1) * room, side="right"))
        held = float(dense_work[cut - 1]) if cut else 0.0
        if cut < len(work):
            space = (j + 1) * room - (int(dense_tokens[cut - 1]) if cut else 0)
            held += float(work[densest[cut]]) * space / float(capped[densest[cut]])
        bound = max(bound, largest + (total - held) / num_ranks)
    return max(1.0, bound * num_ranks / total)
