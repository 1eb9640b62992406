"""What the README's blocks take for granted: a model, a loader, a loop's settings."""

from __future__ import annotations

from functools import partial  # noqa: F401
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader  # noqa: F401
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from commons.distributed import BatchShuffler, BatchShufflerFactory, register_batch_shuffler
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model

device = torch.device("cpu")
number_of_ranks = num_ranks = dist.get_world_size()
rank = dist.get_rank()


def _batch(rows: int = 6) -> BaseBatch:
    lengths = torch.arange(rows) * (1 + rank) + 1
    features = KeyedJaggedTensor(["item"], torch.randint(50, (int(lengths.sum()),)), lengths=lengths)
    return BaseBatch(features, rows, {"item": 50}, labels=torch.rand(rows))


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
loader = [_batch() for _ in range(3)]

# On a controller.
num_chunks, workloads = 4, torch.arange(8)


def worker(chunk: BaseBatch) -> torch.Tensor:
    return torch.zeros(chunk.batch_size)


class _Source:
    """Samples that are numbers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, samples: list[int], batch_size: int) -> list[int]:
        assert len(samples) <= batch_size
        return samples


source, lengths, batch_size, epoch, start_step = _Source(), list(range(1, 41)), 4, 0, 0


@register_batch_shuffler("my_model")
class _FirstShuffler(BatchShuffler):
    def get_workloads(self, batch: BaseBatch) -> torch.Tensor:
        return batch.num_tokens()


def before_block(code: str, names: dict[str, Any]) -> None:
    """The page registers the shuffler behind the block that creates it, and uses one name in two ways."""
    if '@register_batch_shuffler("my_model")' in code:
        BatchShufflerFactory.unregister("my_model")
    if "pipeline.progress(batches)" in code:
        names["batches"] = iter([_batch() for _ in range(3)])
    if "pipeline" in names:
        names["pipeline"].reset()
    if "run_micro_batches(" in code:
        names["model"] = names["pipeline"].detach()
    if "split_balanced(batch" in code:
        names["batch"] = _batch(8)
    if "shuffler." in code:
        settings = {"max_tokens_per_micro_batch": 20} if "micro_batches" in code else {}
        names["shuffler"] = BatchShufflerFactory.create("my_model", **settings)
