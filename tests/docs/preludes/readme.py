"""A model and a loader for the Python blocks of the README and of the page about your own model."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model

device = torch.device("cpu")


def _batch(rows: int = 6) -> BaseBatch:
    lengths = torch.arange(rows) * (1 + dist.get_rank()) + 1
    features = KeyedJaggedTensor(["item"], torch.randint(50, (int(lengths.sum()),)), lengths=lengths)
    return BaseBatch(features, rows, {"item": 50}, labels=torch.ones(rows))


class _Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(4, 1)

    def forward(self, items: Any, batch: BaseBatch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = torch.stack([row.sum(0) for row in items.to_dense()])
        scores = self.out(pooled).squeeze(1)
        return (scores - batch.labels)[: batch.num_samples].square().sum(), scores


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item_table", num_embeddings=50, embedding_dim=4, feature_names=["item"])
        self.embeddings = EmbeddingCollection([table])
        self.head = _Head()

    def forward(self, batch: BaseBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(self.embeddings(batch.features)["item"], batch)


model, optimizer = shard_model(_Model(), OptimizerArgs("sgd", 0.01), device)
loader = [_batch()]  # one step, so that no next one is on its way when the page ends
