"""Streams of users' samples: how many samples each user has, and which rank loads each sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Width of the HSTU layer. Only the shape of its costs matters, not their unit.
HIDDEN_SIZE = 128
BYTES_PER_TOKEN = 4
LENGTHS = ("20 to 200", "lognormal")
USERS = ("4 each", "16 each", "Zipf", "half in fours")
ORDERS = ("dealt", "user-major")


@dataclass(frozen=True)
class Stream:
    """The samples of one step. A user's samples are equally long, and have the same ids.

    Attributes:
        ranks: number of ranks, which have loaded equally many samples.
        workloads, sizes: FLOPs and bytes of each sample, int64 `[samples]`.
        user, home: each sample's user, and the rank that loaded the sample, int64 `[samples]`.
        length: number of ids of each user, int64 `[users]`.
    """

    ranks: int
    workloads: np.ndarray
    sizes: np.ndarray
    user: np.ndarray
    home: np.ndarray
    length: np.ndarray

    def figures(self, partition: list[np.ndarray]) -> dict[str, float]:
        """Returns ranks per user, all ranks' unique ids ÷ unique ids as loaded, and the share of moves."""
        rank_of = np.empty_like(self.home)
        for rank, samples in enumerate(partition):
            rank_of[samples] = rank
        placed, loaded = (np.unique(self.user * self.ranks + rank) for rank in (rank_of, self.home))
        return {
            "ranks_per_user": len(placed) / len(self.length),
            "unique_ids": int(self.length[placed // self.ranks].sum())
            / int(self.length[loaded // self.ranks].sum()),
            "moved": float((rank_of != self.home).mean()),
        }


def draw(ranks: int, rows: int, users: str, lengths: str, order: str, seed: int) -> Stream:
    """Returns a random stream. A user's samples follow one another, or are dealt to the ranks in turn."""
    rng, count = np.random.default_rng([seed, ranks, rows]), ranks * rows
    samples_of = _draw_sample_counts(users, count, rng)
    if lengths == "20 to 200":
        length = rng.integers(20, 201, len(samples_of))
    elif lengths == "lognormal":
        length = np.rint(rng.lognormal(5, 1.2, len(samples_of))).clip(1, 4096).astype(np.int64)
    else:
        length = np.full(len(samples_of), int(lengths))
    user = np.repeat(np.arange(len(samples_of)), samples_of)
    tokens = 2 * length[user] + 1
    workloads = 10 * tokens * HIDDEN_SIZE**2 + 4 * tokens**2 * HIDDEN_SIZE
    home = np.arange(count) // rows if order == "user-major" else np.arange(count) % ranks
    return Stream(ranks, workloads, BYTES_PER_TOKEN * tokens, user, home, length)


def _draw_sample_counts(users: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the number of samples of each user, int64 `[users]`. They sum to `count`."""
    if users == "half in fours":
        fours = count // 8
        samples_of = np.repeat([4, 1], [fours, count - 4 * fours])
        rng.shuffle(samples_of)
    elif users == "Zipf":
        share = 1 / np.arange(1, count // 4 + 1)
        samples_of = rng.multinomial(count, share / share.sum())
        samples_of = samples_of[samples_of > 0]
        rng.shuffle(samples_of)
    else:
        each = int(users.removesuffix(" each"))
        samples_of = np.full(-(-count // each), each)
    ends = np.minimum(np.cumsum(samples_of), count)
    samples_of = np.diff(ends, prepend=0)
    return samples_of[samples_of > 0]
