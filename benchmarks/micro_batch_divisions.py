"""Ways to divide a step's samples into micro-batches on ranks, and a lower bound for all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import numpy as np

from benchmarks.partition.placements import LONGEST, GlobalBatch
from commons.extensions.micro_batches import pack_micro_batches
from commons.partition import karmarkar_karp, loads, refined

MAX_TOKENS = 8192

# Sample indices of each micro-batch of each rank.
Ranks = list[list[np.ndarray]]


Divide = Callable[[GlobalBatch], Ranks]


def draw_rounded(rng: np.random.Generator, count: int) -> np.ndarray:
    """Returns `count` random heavy-tailed lengths.

    The longest samples exceed a micro-batch's cap by one token, so any division under the cap isolates them.
    """
    return np.rint(rng.lognormal(5, 1.2, count).clip(1, LONGEST))


def divide_evenly(step: GlobalBatch, equal_size: bool) -> Ranks:
    """Balances ranks with `refined`, then packs each, again if another needs more micro-batches."""
    partition, count = refined(step.workloads, step.ranks, equal_size), 1

    def pack() -> Ranks:
        return [
            [own[part] for part in pack_micro_batches(*of_rank, MAX_TOKENS, min_count=count)]
            for own in partition
            for of_rank in [(step.workloads[own], step.tokens[own])]
        ]

    with warnings.catch_warnings():
        # Some samples exceed the cap on purpose, as `draw_rounded` explains.
        warnings.filterwarnings("ignore", message=".*gets a micro-batch of its own")
        ranks = pack()
        count = max(map(len, ranks))
        return ranks if count == min(map(len, ranks)) else pack()


def pack_as_loaded(step: GlobalBatch) -> Ranks:
    """Packs each rank's own samples by tokens. Empty micro-batches give all ranks the same number."""
    as_loaded = np.split(np.arange(len(step.tokens)), step.ranks)
    return _match_counts(step, [_pack(step.tokens, samples) for samples in as_loaded])


def pack_and_deal(step: GlobalBatch) -> Ranks:
    """Packs all ranks' samples together, largest first, and deals the micro-batches to ranks in turn."""
    micro_batches = _pack(step.tokens, np.argsort(-step.tokens, kind="stable"))
    return _match_counts(step, [micro_batches[rank :: step.ranks] for rank in range(step.ranks)])


def balance_flops(step: GlobalBatch) -> Ranks:
    """Balances FLOPs over ranks, then over each rank's micro-batches. Tokens set only their number."""
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
    "ours, equal rows": lambda step: divide_evenly(step, equal_size=True),
    "ours, unequal rows": lambda step: divide_evenly(step, equal_size=False),
    "first fit by tokens, as loaded": pack_as_loaded,
    "first fit decreasing by tokens, dealt out": pack_and_deal,
    "Karmarkar–Karp by FLOPs, no cap": balance_flops,
}


def _pack(tokens: np.ndarray, samples: Iterable[int]) -> list[np.ndarray]:
    """Puts each sample into the first micro-batch with room. A sample above the cap is alone in one."""
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
    """Adds empty micro-batches until all ranks have equally many, and sorts them by load, the best order."""
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

    Sort the positions k by their largest load, descending. The caps limit the tokens in the first j − 1
    positions, so position j holds at least the heaviest sample that does not fit there. The first j positions
    hold at most the work of the samples with the most work per token that fit into their caps, and the ranks
    share the rest evenly at best. The bound is the largest sum of both parts over all j.

    Args:
        workloads, tokens: non-negative numbers, `[samples]`. Tokens are whole numbers.
        num_ranks, count: number of ranks, and of micro-batches per rank, both at least 1.
        max_tokens: largest number of tokens per micro-batch. A sample above it is alone in a micro-batch.
    """
    order = np.argsort(-np.asarray(workloads, dtype=np.float64), kind="stable")
    work = np.asarray(workloads, dtype=np.float64)[order]
    capped = np.minimum(np.asarray(tokens, dtype=np.int64), max_tokens)[order]
    total, room = float(work.sum()), num_ranks * max_tokens  # room: tokens of one position on all ranks
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
