"""Pads histories, like SASRec, and balances them: torchrun --nproc_per_node 2 examples/padded_sasrec.py

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
from workload_balancer.balance_meter import BalanceMeter  # balancing
from workload_balancer.distributed import BatchShuffler  # balancing
from workload_balancer.extensions.padded import Padded  # balancing
from workload_balancer.first_cause import show_first_cause_only  # balancing
from workload_balancer.pipeline import TrainPipelineFactory  # balancing

LONGEST, ITEMS, WIDTH = 200, 300, 16


def draw(shard: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:  # items, and the item after each
    drawn = torch.Generator().manual_seed(1_000_003 * shard + row)
    length = int(torch.empty(()).log_normal_(3, 1.2, generator=drawn).clamp(1, LONGEST))
    items = torch.randint(30, (length + 1,), generator=drawn).cumsum(0) % ITEMS
    return items[:-1], items[1:]


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, KeyedJaggedTensor]:
    items, following = (JaggedTensor.from_dense(list(column)) for column in zip(*rows, strict=True))
    return {
        "items": KeyedJaggedTensor.from_jt_dict({"item": items}),
        "targets": KeyedJaggedTensor.from_jt_dict({"item": following}),
    }


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.out = torch.nn.Embedding(LONGEST, WIDTH), torch.nn.Linear(WIDTH, ITEMS)
        self.block = torch.nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, embedded: JaggedTensor, targets: KeyedJaggedTensor) -> torch.Tensor:
        padded = embedded.to_padded_dense()  # [rows, the rank's own longest, WIDTH]
        longest, device = padded.shape[1], padded.device
        causal = torch.ones(longest, longest, dtype=torch.bool, device=device).triu(1)  # hides padding, too
        hidden = self.block(padded + self.positions.weight[:longest], src_mask=causal)
        is_real = torch.arange(longest, device=device) < embedded.lengths()[:, None]
        return functional.cross_entropy(self.out(hidden)[is_real], targets.values())


class SASRec(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection([EmbeddingConfig(ITEMS, WIDTH, "item", feature_names=["item"])])
        self.decoder = Decoder()

    def forward(self, batch: dict[str, KeyedJaggedTensor]) -> tuple[torch.Tensor, None]:
        # before: return self.decoder(self.embeddings(batch["items"])["item"], batch["targets"])
        return self.decoder(self.embeddings(batch["items"])["item"], batch["targets"]), None  # balancing


class HistoryShuffler(BatchShuffler):  # balancing
    def get_workloads(self, batch: dict[str, KeyedJaggedTensor]) -> torch.Tensor:  # without padding
        n = batch["items"].lengths()
        return 2 * WIDTH * n * (12 * WIDTH + ITEMS + 2 * n)  # the block, the scores, attention

    def get_loss_tokens(self, batch: dict[str, KeyedJaggedTensor]) -> torch.Tensor:
        return batch["targets"].lengths()


def train(data: list[tuple[torch.Tensor, ...]], device: torch.device) -> tuple[torch.Tensor, torch.nn.Module]:
    torch.manual_seed(1)
    model = SASRec().to(device)
    apply_optimizer_in_backward(torch.optim.SGD, model.embeddings.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(model.decoder.parameters(), lr=0.1)
    plan = construct_module_sharding_plan(model.embeddings, {"item": row_wise(compute_kernel="fused")})
    model = DistributedModelParallel(model, device=device, plan=ShardingPlan({"embeddings": plan}))
    batches, losses = iter(DataLoader(data, batch_size=8, collate_fn=collate)), []
    # before: for batch in batches:
    # before:     loss = model(batch)
    # before:     optimizer.zero_grad()
    # before:     loss.backward()
    # before:     optimizer.step()
    # before:     losses.append(loss.detach() / dist.get_world_size())
    shuffler = HistoryShuffler(equal_rows=False, extensions=[Padded()])  # balancing
    pipeline = TrainPipelineFactory.create(  # balancing
        "native", model, optimizer, device, batch_shuffler=shuffler, loss_reduction="mean"
    )
    meter = BalanceMeter(pipeline)  # balancing
    while True:  # balancing
        try:
            pipeline.progress(batches)
        except StopIteration:  # on all ranks in the same call
            break
        losses.append(pipeline.loss_sum / pipeline.loss_tokens)  # this rank's part, summed below
        meter.add()
    figures = meter.close()  # balancing
    if dist.get_rank() == 0:  # balancing
        for name in ("imbalance_before", "imbalance_after", "padding_before", "padding_after"):
            print(f"{name} {figures[name]:.2f}", flush=True)
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
