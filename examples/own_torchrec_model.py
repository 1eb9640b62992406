"""Balances your own TorchRec model: torchrun --nproc_per_node 2 examples/own_torchrec_model.py"""

import workload_balancer.quiet_logs  # noqa: F401  isort: skip
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from workload_balancer.distributed import BalanceReport, BatchShuffler
from workload_balancer.first_cause import show_first_cause_only
from workload_balancer.sequence_batch import BaseBatch


@dataclass(kw_only=True)
class Sessions(BaseBatch):
    prices: torch.Tensor  # [batch_size, 1]; tensor fields travel with their samples


class SessionShuffler(BatchShuffler):
    def get_workloads(self, batch: Sessions) -> torch.Tensor:
        return batch.num_tokens() ** 2  # the cost of attention


class PurchaseModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="shop", num_embeddings=10_000, embedding_dim=64, feature_names=["item"])
        self.embeddings = EmbeddingCollection([table])
        self.head = torch.nn.Linear(64 + 1, 1)

    def forward(self, batch: Sessions) -> torch.Tensor:
        sessions = self.embeddings(batch.features)["item"].to_dense()  # [length, 64] of each row
        pooled = torch.stack([functional.scaled_dot_product_attention(s, s, s).sum(0) for s in sessions])
        logits = self.head(torch.cat([pooled, batch.prices], dim=1))
        losses = functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return losses[: batch.num_samples].sum()  # padding rows come last and have no loss


def load_batch(rows: int = 16, longest: int = 512) -> Sessions:
    lengths = torch.empty(rows).log_normal_(4, 1.2).clamp(1, longest).long()
    features = KeyedJaggedTensor(["item"], torch.randint(10_000, (int(lengths.sum()),)), lengths=lengths)
    prices = torch.randn(rows, 1)
    return Sessions(features, rows, {"item": longest}, labels=(prices < 0).float(), prices=prices)


if __name__ == "__main__":
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    show_first_cause_only()
    model = PurchaseModel().to(device)
    apply_optimizer_in_backward(torch.optim.SGD, model.embeddings.parameters(), {"lr": 0.1})
    optimizer = torch.optim.Adam(model.head.parameters(), lr=0.03)
    # Without "fused", the default kernel on CPU sums the embeddings of a row.
    table_plan = construct_module_sharding_plan(model.embeddings, {"shop": row_wise(compute_kernel="fused")})
    model = DistributedModelParallel(model, device=device, plan=ShardingPlan({"embeddings": table_plan}))
    shuffler = SessionShuffler()
    torch.manual_seed(dist.get_rank())  # each rank loads its own sessions
    for batch, plan in shuffler.plan_ahead(load_batch() for _ in range(10)):  # on the host, a step ahead
        loss_sum = model(shuffler.exchange(batch.to(device), plan))
        loss = shuffler.scale(loss_sum, plan, "sum")  # averages over ranks to the mean over all samples
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            report = BalanceReport.of(plan, shuffler.settings.equal_rows)
            before, after = report.imbalance_before, report.imbalance_after
            print(f"loss {loss:.4f}  imbalance {before:.3f} -> {after:.3f}", flush=True)
    dist.barrier()  # a rank that leaves early breaks the others' connections
    dist.destroy_process_group()
