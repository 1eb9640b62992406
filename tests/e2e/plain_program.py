"""A program of a user's own, in which the loader may fail on the last rank, for tests.

torchrun ... tests/e2e/plain_program.py loader|none
"""

import sys
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from commons.distributed import BatchShuffler, show_first_cause_only
from commons.pipeline import TrainPipelineFactory

STEPS = 12


class Shuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch.sparse_features.lengths() ** 2


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def forward(self, embeddings, labels):
        pooled = torch.stack([rows.sum(0) for rows in embeddings["item"].to_dense()])
        losses = (self.linear(pooled).squeeze(1) - labels) ** 2
        return losses.sum(), losses.detach()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        table = EmbeddingConfig(name="table", num_embeddings=100, embedding_dim=8, feature_names=["item"])
        self.embeddings = EmbeddingCollection([table])
        self.head = Head()

    def forward(self, batch):
        return self.head(self.embeddings(batch.sparse_features), batch.labels)


def load(rows=8):
    for step in count():
        if step == 3 and sys.argv[1] == "loader" and dist.get_rank() == dist.get_world_size() - 1:
            Path("failed").touch()
            raise ValueError("the loader fails")
        lengths = torch.randint(1, 20, (rows,))
        features = KeyedJaggedTensor(["item"], torch.randint(100, (int(lengths.sum()),)), lengths=lengths)
        yield Batch(torch.randn(rows, 1), features, torch.rand(rows))


def main():
    dist.init_process_group("gloo")
    show_first_cause_only()
    device, model = torch.device("cpu"), Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.embeddings.parameters(), {"lr": 0.1})
    plan = construct_module_sharding_plan(model.embeddings, {"table": row_wise(compute_kernel="fused")})
    optimizer = torch.optim.SGD(model.head.parameters(), 0.01)
    model = DistributedModelParallel(model, device=device, plan=ShardingPlan({"embeddings": plan}))
    pipeline = TrainPipelineFactory.create(
        "native",
        model=model,
        optimizer=optimizer,
        device=device,
        batch_shuffler=Shuffler(partitioner="karmarkar_karp"),  # which compiles least
        loss_reduction="sum",
    )
    batches = load()
    for _ in range(STEPS):
        pipeline.progress(batches)
    print("trained")
    dist.barrier()  # without both lines, gloo's threads may abort a process that ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
