"""A small dataset of items as semantic IDs, prepared as users do."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from commons.datasets import sid_preprocess

NUM_ITEMS, NUM_HIERARCHIES, CODEBOOK_SIZE = 60, 3, 16
CATALOGUE = [
    f"DatasetArgs.num_hierarchies = {NUM_HIERARCHIES}",
    f"DatasetArgs.codebook_sizes = {[CODEBOOK_SIZE] * NUM_HIERARCHIES}",
]


def prepare_shop(directory: Path, lengths: Sequence[int], split: Sequence[int]) -> None:
    """Prepares a dataset of users with so many items before the next, split by percentages."""
    rng = random.Random(0)
    interactions = directory / "interactions.jsonl"
    with interactions.open("w") as file:
        for user, length in enumerate(lengths):
            items = [rng.randrange(NUM_ITEMS) for _ in range(length)]
            print(json.dumps({"user": user, "history": items, "next": rng.randrange(NUM_ITEMS)}), file=file)
    files = ["--interactions", str(interactions), "--out", str(directory)]
    sid_preprocess.main([*files, "--split", *map(str, split)])
    codes = torch.randint(0, CODEBOOK_SIZE, (NUM_HIERARCHIES, NUM_ITEMS), generator=torch.manual_seed(0))
    torch.save(codes, directory / "item_to_sid.pt")
