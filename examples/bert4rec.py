"""Predicts masked items, like BERT4Rec: torchrun --nproc_per_node 2 examples/bert4rec.py

"# balancing" marks the statements that switch the stage on. "# before:" marks the code they replace."""

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from workload_balancer.distributed import BatchShuffler  # balancing
from workload_balancer.first_cause import show_first_cause_only  # balancing
from workload_balancer.pipeline import TrainPipelineFactory  # balancing

LONGEST, MASK = 100, 300  # ids of items are below MASK


def draw(shard: int, row: int) -> tuple[torch.Tensor, ...]:  # draws the masks with the sample
    drawn = torch.Generator().manual_seed(1_000_003 * shard + row)
    length = int(torch.empty(()).log_normal_(2.5, 1.2, generator=drawn).clamp(1, LONGEST))
    items = torch.randint(30, (length,), generator=drawn)
    positions = (torch.rand(length, generator=drawn) < 0.2).nonzero().squeeze(1)
    return items.index_fill(0, positions, MASK), positions, items[positions]


def collate(rows: list[tuple[torch.Tensor, ...]]) -> dict[str, KeyedJaggedTensor]:
    items, positions, targets = (JaggedTensor.from_dense(values) for values in zip(*rows, strict=True))
    masked = KeyedJaggedTensor.from_jt_dict({"position": positions, "target": targets})
    return {"items": KeyedJaggedTensor.from_jt_dict({"item": items}), "masked": masked}


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.out = torch.nn.Embedding(LONGEST, 16), torch.nn.Linear(16, MASK)

    def forward(self, embedded: JaggedTensor, masked: KeyedJaggedTensor) -> torch.Tensor:
        found = []
        for history, positions in zip(embedded.to_dense(), masked["position"].to_dense(), strict=True):
            hidden = history + self.positions.weight[: len(history)]
            found.append(functional.scaled_dot_product_attention(hidden, hidden, hidden)[positions])
        return functional.cross_entropy(self.out(torch.cat(found)), masked["target"].values())


class Bert4Rec(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection([EmbeddingConfig(MASK + 1, 16, "item", feature_names=["item"])])
        self.encoder = Encoder()

    def forward(self, batch: dict[str, KeyedJaggedTensor]) -> tuple[torch.Tensor, None]:
        # before: return self.encoder(self.embeddings(batch["items"])["item"], batch["masked"])
        return self.encoder(self.embeddings(batch["items"])["item"], batch["masked"]), None  # balancing


class MaskedShuffler(BatchShuffler):  # balancing
    def get_workloads(self, batch: dict[str, KeyedJaggedTensor]) -> torch.Tensor:
        return batch["items"].lengths() ** 2  # attention

    def get_loss_tokens(self, batch: dict[str, KeyedJaggedTensor]) -> torch.Tensor:
        return batch["masked"]["target"].lengths()


def train(data: list[tuple[torch.Tensor, ...]], device: torch.device) -> tuple[torch.Tensor, torch.nn.Module]:
    torch.manual_seed(1)
    model = Bert4Rec().to(device)
    apply_optimizer_in_backward(torch.optim.SGD, model.embeddings.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.1)
    plan = construct_module_sharding_plan(model.embeddings, {"item": row_wise(compute_kernel="fused")})
    model = DistributedModelParallel(model, device=device, plan=ShardingPlan({"embeddings": plan}))
    batches, losses = iter(DataLoader(data, batch_size=8, collate_fn=collate)), []
    # before: for batch in batches:
    # before:     loss = model(batch)
    # before:     optimizer.zero_grad()
    # before:     loss.backward()
    # before:     optimizer.step()
    # before:     losses.append(loss.detach() / dist.get_world_size())
    pipeline = TrainPipelineFactory.create(  # balancing
        "native", model, optimizer, device, batch_shuffler=MaskedShuffler(), loss_reduction="mean"
    )
    while True:  # balancing
        try:
            pipeline.progress(batches)
        except StopIteration:  # on all ranks in the same call
            break
        losses.append(pipeline.loss_sum / pipeline.loss_tokens)
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return losses, model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    show_first_cause_only()  # balancing
    rank = dist.get_rank()
    losses, _ = train([draw(rank, row) for row in range(157 - 3 * rank)], torch.device("cpu"))
    for loss in losses if rank == 0 else ():
        print(f"loss {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
