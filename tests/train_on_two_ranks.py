"""Trains a small TorchRec model with the core alone: `torchrun --nproc-per-node=2 -m` this module."""

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from commons.distributed import BatchShuffler
from commons.pipeline import TrainPipelineFactory
from commons.sequence_batch import BaseBatch

IDS, ROWS, STEPS = 100, 16, 20


class Squares(BatchShuffler):
    def get_workloads(self, batch: BaseBatch) -> torch.Tensor:
        return batch.num_tokens() ** 2


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name="item_table", embedding_dim=8, num_embeddings=IDS, feature_names=["item"])
        ]
        self.embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.head = torch.nn.Linear(8, 1)

    def forward(self, batch: BaseBatch) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.embeddings(batch.features).values())[:, 0]
        losses = torch.nn.functional.binary_cross_entropy_with_logits(scores, batch.labels, reduction="none")
        return losses[: batch.num_samples], scores.detach()


def make_batch(generator: torch.Generator) -> BaseBatch:
    """Draws histories, a few of them long, and whether most of their ids are even."""
    lengths = torch.rand(ROWS, generator=generator).pow(-1.2).clamp(max=99).long()
    ids = [torch.randint(IDS, (int(length),), generator=generator) for length in lengths]
    labels = torch.tensor([float((history % 2 == 0).float().mean() > 0.5) for history in ids])
    features = KeyedJaggedTensor(["item"], torch.cat(ids), lengths=lengths)
    return BaseBatch(features, ROWS, {"item": 99}, labels=labels)


dist.init_process_group("gloo")
generator = torch.Generator().manual_seed(dist.get_rank())
model = DistributedModelParallel(Model(), device=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
pipeline = TrainPipelineFactory.create(
    "native", model=model, optimizer=optimizer, device="cpu", batch_shuffler=Squares(), loss_reduction="sum"
)
batches = iter([make_batch(generator) for _ in range(STEPS)])
for step in range(STEPS):
    loss_sum, loss_tokens, _ = pipeline.progress(batches)
    dist.all_reduce(loss_sum)
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss_sum.item() / loss_tokens:.3f}, {pipeline.report}")
dist.barrier()
dist.destroy_process_group()
