"""A small dataset in the format of ml-100k, prepared as users do."""

import random
from pathlib import Path

from tests.e2e.torchrun import python


def prepare_movielens(directory: Path) -> None:
    """Prepares the dataset of 40 users with 2 to 30 ratings each in `directory`/data/ml-100k."""
    raw = directory / "data/ml-100k/raw"
    raw.mkdir(parents=True)
    rng = random.Random(0)
    ratings = [
        f"{user}\t{rng.randint(1, 50)}\t{rng.randint(1, 5)}\t{time}\n"
        for user in range(1, 41)
        for time in range(rng.randint(2, 30))
    ]
    rng.shuffle(ratings)
    (raw / "u.data").write_text("".join(ratings))
    users = [f"{user}|{20 + user % 7}|{'MF'[user % 2]}|writer|{user % 5}\n" for user in range(1, 41)]
    (raw / "u.user").write_text("".join(users))
    python(directory, "-m", "commons.datasets.movielens_preprocess", "--dataset", "ml-100k")
