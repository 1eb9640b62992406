"""A small dataset in the format of ml-100k, prepared as users do."""

import contextlib
import random
from collections.abc import Sequence
from pathlib import Path

from commons.datasets import movielens_preprocess

USUAL_LENGTHS = tuple(2 + user * 11 % 29 for user in range(40))  # 2 to 30


def prepare_movielens(directory: Path, lengths: Sequence[int] = USUAL_LENGTHS) -> None:
    """Prepares a dataset in `directory`/data/ml-100k; each of `lengths` is a user's number of ratings."""
    raw = directory / "data/ml-100k/raw"
    raw.mkdir(parents=True)
    rng = random.Random(0)
    ratings = [
        f"{user}\t{rng.randint(1, 50)}\t{rng.randint(1, 5)}\t{time}\n"
        for user, length in enumerate(lengths, start=1)
        for time in range(length)
    ]
    rng.shuffle(ratings)
    (raw / "u.data").write_text("".join(ratings))
    users = [
        f"{user}|{20 + user % 7}|{'MF'[user % 2]}|writer|{user % 5}\n" for user in range(1, len(lengths) + 1)
    ]
    (raw / "u.user").write_text("".join(users))
    with contextlib.chdir(directory):
        movielens_preprocess.main(["--dataset", "ml-100k"])
