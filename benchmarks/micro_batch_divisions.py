"""Ways to divide a step's samples into micro-batches on ranks, and a bound that none beats."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import numpy as np

from benchmarks.partition.lengths import LONGEST
from benchmarks.partition.placements import GlobalBatch
from commons.extensions.micro_batches import balance_micro_batches
from commons.partition import karmarkar_karp, loads

MAX_TOKENS = 8192

# For each rank and micro-batch the indices of its samples.
Ranks = list[list[np.ndarray]]


Divide = Callable[[GlobalBatch], Ranks]


def draw_rounded(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draws heavy-tailed lengths.

    The longest have one token more than a micro-batch may: they are alone in theirs, whoever divides.
    """
    return np.rint(rng.lognormal(5, 1.2, count).clip(1, LONGEST))


def divide_balanced(step: GlobalBatch, equal_size: bool) -> Ranks:
    """Divides by `balance_micro_batches`."""
    with warnings.catch_warnings():
        # Some are meant to be above the cap: see `draw_rounded`.
        warnings.filterwarnings("ignore", message=".*gets a micro-batch of its own")
        return balance_micro_batches(step.workloads, step.tokens, step.ranks, MAX_TOKENS, equal_size)


def pack_as_loaded(step: GlobalBatch) -> Ranks:
    """Packs on each rank what it loaded by tokens; all take as many micro-batches as the one with most."""
    as_loaded = np.split(np.arange(len(step.tokens)), step.ranks)
    return _match_counts(step, [_pack(step.tokens, samples) for samples in as_loaded])


def pack_and_deal(step: GlobalBatch) -> Ranks:
    """Packs all samples together, the largest first, and deals micro-batches to ranks in turn."""
    micro_batches = _pack(step.tokens, np.argsort(-step.tokens, kind="stable"))
    return _match_counts(step, [micro_batches[rank :: step.ranks] for rank in range(step.ranks)])


def balance_flops(step: GlobalBatch) -> Ranks:
    """Balances ranks, then the micro-batches of each, by FLOPs; tokens only say how many micro-batches."""
    partition = karmarkar_karp(step.workloads, step.ranks)
    count = -(-int(loads(step.tokens, partition).max()) // MAX_TOKENS)
    return _match_counts(
        step,
        [
            [samples[part] for part in karmarkar_karp(step.workloads[samples], count, equal_size=False)]
            for samples in partition
        ],
    )


DIVISIONS: dict[str, Divide] = {
    "ours, equal rows": lambda step: divide_balanced(step, equal_size=True),
    "ours, unequal rows": lambda step: divide_balanced(step, equal_size=False),
    "first fit by tokens, as loaded": pack_as_loaded,
    "first fit decreasing by tokens, dealt out": pack_and_deal,
    "Karmarkar–Karp by FLOPs, no cap": balance_flops,
}


def _pack(tokens: np.ndarray, samples: Iterable[int]) -> list[np.ndarray]:
    """Puts samples, as they come, into the first micro-batch with room; one above the cap is alone."""
    micro_batches: list[list[int]] = []
    left: list[int] = []
    for sample in samples:
        amount = int(tokens[sample])
        number = next((number for number, room in enumerate(left) if room >= amount), len(left))
        if number == len(left):
            micro_batches.append([])
            left.append(MAX_TOKENS)
        micro_batches[number].append(sample)
        left[number] -= amount
    return [np.array(indices, dtype=np.int64) for indices in micro_batches]


def _match_counts(step: GlobalBatch, ranks: Ranks) -> Ranks:
    """Adds empty ones up to as many on every rank, the lightest first, which no other order betters."""
    count = max(map(len, ranks))
    nothing = np.empty(0, dtype=np.int64)
    filled = [[*micro_batches, *[nothing] * (count - len(micro_batches))] for micro_batches in ranks]
    return [
        [micro_batches[k] for k in np.argsort(loads(step.workloads, micro_batches))]
        for micro_batches in filled
    ]


def micro_batch_lower_bound(
    workloads: np.ndarray, tokens: np.ndarray, num_ranks: int, count: int, max_tokens: int
) -> float:
    """Returns a `micro_batch_imbalance` that no division into `count` micro-batches per rank beats.

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
