"""Lists of plain values in micro-batches, and beside values of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import BatchShuffler
from commons.extensions.micro_batches import MicroBatches
from commons.sequence_batch import BaseBatch

ROWS, COSTS = 6, [9, 1, 4, 4, 1, 7]
TEXTS = [f"text {row}" for row in range(ROWS)]


@dataclass
class Texts(BaseBatch):
    texts: list = field(default_factory=list)


def padded() -> Texts:
    features = KeyedJaggedTensor(["item"], torch.arange(ROWS), lengths=torch.ones(ROWS, dtype=torch.int64))
    return Texts(features, ROWS, {}, texts=TEXTS)


class Costs(BatchShuffler):
    def get_workloads(self, batch):
        return torch.tensor(COSTS)

    def get_tokens(self, batch):
        return torch.tensor(COSTS)


@pytest.mark.parametrize("is_padded", [False, True])
def test_entries_go_with_the_rows_of_micro_batches_and_come_back(is_padded):
    micro = MicroBatches(max_tokens=10)
    shuffler = Costs(extensions=[micro])
    batch = padded() if is_padded else {"ids": torch.arange(ROWS), "text": TEXTS}
    plan = shuffler.plan(batch)
    parts = micro.micro_batches(shuffler.exchange(batch, plan), plan)
    assert len(parts) > 1
    if is_padded:
        texts, rows = [part.texts for part in parts], [part.features.values() for part in parts]
    else:
        texts, rows = [part["text"] for part in parts], [part["ids"] for part in parts]
    assert texts == [[TEXTS[row] for row in of.tolist()] for of in rows]
    values = [{"ids": of, "text": text, "fixed": ["a"] * 9} for of, text in zip(rows, texts, strict=True)]
    joined = micro.join_values(values, plan)
    assert joined["text"] == TEXTS and joined["ids"].tolist() == list(range(ROWS))
    assert micro.join_values(texts, plan) == TEXTS
