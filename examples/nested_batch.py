"""Trains a sequence model that no pipeline can trace: torchrun --nproc_per_node 2 examples/nested_batch.py

"# balancing" marks the statements that switch the stage on. "# before:" marks the code they replace."""

from dataclasses import dataclass

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

FEATURES = ["viewed", "bought", "shown"]


@dataclass
class Visits:
    items: dict[str, dict[str, KeyedJaggedTensor]]  # "history": viewed and bought; "candidate": shown
    clicked: torch.Tensor  # [visits]


def draw(shard: int, row: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1_000_003 * shard + row)
    counts = torch.empty(2).log_normal_(2, 1.2, generator=drawn).clamp(max=200).int().tolist()
    items = [torch.randint(500, (count,), generator=drawn) for count in (*counts, 1)]
    return dict(zip(FEATURES, items, strict=True))


def collate(rows: list[dict[str, torch.Tensor]]) -> Visits:
    columns = {name: JaggedTensor.from_dense([row[name] for row in rows]) for name in FEATURES}
    kjts = {name: KeyedJaggedTensor.from_jt_dict({name: column}) for name, column in columns.items()}
    clicked = (columns["shown"].values() < 150).float()
    return Visits({"candidate": {"shown": kjts.pop("shown")}, "history": kjts}, clicked)


class ClickModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection([EmbeddingConfig(500, 16, "item", feature_names=FEATURES)])
        self.dense = torch.nn.Linear(32, 1)

    def forward(self, visits: Visits) -> tuple[torch.Tensor, torch.Tensor]:
        kjts = [kjt for group in visits.items.values() for kjt in group.values()]
        found = self.embeddings(KeyedJaggedTensor.concat(kjts))
        states = []
        for viewed, bought, shown in zip(*(found[name].to_dense() for name in FEATURES), strict=True):
            history = torch.cat([viewed, bought])
            if len(history):  # a new user has none
                history = functional.scaled_dot_product_attention(history, history, history)
            states.append(torch.cat([history.sum(0), shown[0]]))
        scores = self.dense(torch.stack(states)).squeeze(1)
        # before: return functional.binary_cross_entropy_with_logits(scores, visits.clicked)
        return functional.binary_cross_entropy_with_logits(scores, visits.clicked), scores  # balancing


class VisitShuffler(BatchShuffler):  # balancing
    def get_workloads(self, visits: Visits) -> torch.Tensor:
        return sum(kjt.lengths() for kjt in visits.items["history"].values()) ** 2  # attention


def train(data: list[dict[str, torch.Tensor]], device: torch.device) -> tuple[torch.Tensor, torch.nn.Module]:
    torch.manual_seed(1)
    model = ClickModel().to(device)
    apply_optimizer_in_backward(torch.optim.SGD, model.embeddings.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    plan = construct_module_sharding_plan(model.embeddings, {"item": row_wise(compute_kernel="fused")})
    model = DistributedModelParallel(model, device=device, plan=ShardingPlan({"embeddings": plan}))
    batches, losses = iter(DataLoader(data, batch_size=8, collate_fn=collate)), []
    # before: for visits in batches:
    # before:     loss = model(visits)
    # before:     optimizer.zero_grad()
    # before:     loss.backward()
    # before:     optimizer.step()
    # before:     losses.append(loss.detach() / dist.get_world_size())
    pipeline = TrainPipelineFactory.create(  # balancing
        "none", model, optimizer, device, batch_shuffler=VisitShuffler(), loss_reduction="mean"
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
