"""Streams of batches, with and without ids that samples share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.batches import make_hstu_batch
from commons.datasets import HSTUBatch

ROWS, NUM_ITEMS, NUM_USERS, NUM_ACTIONS = 32, 100_000, 10_000, 2
SHARED = 0.9  # share of a sample's items that all samples of its user contain
LONGEST = 512

LENGTHS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "uniform in [20, 200]": lambda rng, users: rng.integers(20, 201, users),
    f"lognormal(5, 1.2) in [1, {LONGEST}]": lambda rng, users: (
        rng.lognormal(5, 1.2, users).clip(1, LONGEST).astype(np.int64)
    ),
}


@dataclass(frozen=True)
class Stream:
    """The order of a stream's samples, and the number of samples that share ids.

    Attributes:
        samples_per_user: number of samples per user in a global batch. A user's samples are equally long and
            share `SHARED` of their items.
        shuffled: whether the samples of a global batch are in random order. Otherwise a user's samples follow
            each other, on one rank.
    """

    samples_per_user: int
    shuffled: bool = False


STREAMS = {
    "user-major": Stream(samples_per_user=4),
    "shuffled": Stream(samples_per_user=4, shuffled=True),
    "no shared ids": Stream(samples_per_user=1),
}


def draw_batches(stream: Stream, lengths: str, steps: int, rank: int, num_ranks: int) -> list[HSTUBatch]:
    """Returns a rank's host batches of `ROWS` samples. Every call draws the same batches.

    Args:
        stream: a value of `STREAMS`.
        lengths: a key of `LENGTHS`.
        steps: number of batches.
        rank: the rank that loads the batches.
        num_ranks: number of ranks, each of which loads one batch per step.
    """
    rng = np.random.default_rng(0)
    made = []
    for _ in range(steps):
        users, items = _draw_global_batch(rng, stream, LENGTHS[lengths], ROWS * num_ranks)
        order = rng.permutation(len(items)) if stream.shuffled else np.arange(len(items))
        mine = order[rank * ROWS : (rank + 1) * ROWS]
        actions = [rng.integers(0, NUM_ACTIONS, len(sample_items)) for sample_items in items]
        own = [[values[sample] for sample in mine] for values in (users[:, None], items, actions)]
        made.append(make_hstu_batch({"user_id": own[0]}, *own[1:], ROWS))
    return made


def _draw_global_batch(
    rng: np.random.Generator,
    stream: Stream,
    lengths: Callable[[np.random.Generator, int], np.ndarray],
    num_samples: int,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns each sample's user, `[samples]`, and its items. Different users have no item in common."""
    copies = stream.samples_per_user
    users = rng.choice(NUM_USERS, num_samples // copies, replace=False)
    num_items = lengths(rng, len(users))
    num_shared = np.rint(SHARED * num_items).astype(np.int64)
    num_own = num_items - num_shared
    unused = rng.permutation(NUM_ITEMS)
    items = []
    for shared, own in zip(num_shared, num_own, strict=True):
        user_items, unused = unused[: shared + copies * own], unused[shared + copies * own :]
        own_items = user_items[shared:].reshape(copies, own)
        items += [np.append(user_items[:shared], sample_items) for sample_items in own_items]
    return users.repeat(copies), items
