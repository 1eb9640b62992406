"""Trains TorchRec's DLRM on clicks: torchrun --nproc_per_node 2 examples/pooled_dlrm.py

"# balancing" marks the statements that switch the stage on. "# before:" marks the code they replace.
Only the pipeline's constructor changes, and which rows count in a printed loss. The dense part dominates and
costs the same for every row, so there is little to gain, and nothing to lose.
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

# before: from torchrec.distributed import TrainPipelineSparseDist
from workload_balancer.distributed import BatchShuffler  # balancing
from workload_balancer.first_cause import show_first_cause_only  # balancing
from workload_balancer.pipeline import TrainPipelineFactory  # balancing

LEARNING_RATE = 0.5
FEATURES = {"user": 1, "page": 1, "viewed": 60}  # most ids per row
Row = tuple[torch.Tensor, list[torch.Tensor], float]  # dense features, ids by feature, whether clicked


def draw(shard: int, row: int) -> Row:
    drawn = torch.Generator().manual_seed(1_000_003 * shard + row)
    counts = [int(torch.randint(1, most + 1, (), generator=drawn)) for most in FEATURES.values()]
    ids = [torch.randint(100, (count,), generator=drawn) for count in counts]
    return torch.randn(4, generator=drawn), ids, float(ids[1] < 30)


def collate(rows: list[Row]) -> Batch:
    dense, ids, clicked = zip(*rows, strict=True)
    by_feature = [of_row for of_feature in zip(*ids, strict=True) for of_row in of_feature]
    lengths = torch.tensor([len(of_row) for of_row in by_feature], dtype=torch.int32)
    sparse = KeyedJaggedTensor(list(FEATURES), torch.cat(by_feature), lengths=lengths)
    return Batch(torch.stack(dense), sparse, torch.tensor(clicked))


class ClickShuffler(BatchShuffler):  # balancing
    def get_workloads(self, batch: Batch) -> torch.Tensor:
        ids = batch.sparse_features.lengths().view(len(FEATURES), -1).sum(0)
        return 100 + ids  # the dense part costs the same for every row


def begin(table: torch.Tensor) -> None:  # independent of the rank that holds the table
    torch.nn.init.normal_(table, std=0.1, generator=torch.Generator().manual_seed(2))


def make_model() -> DLRMTrain:
    torch.manual_seed(1)
    tables = [EmbeddingBagConfig(100, 8, name=f, feature_names=[f], init_fn=begin) for f in FEATURES]
    return DLRMTrain(DLRM(EmbeddingBagCollection(tables), 4, [16, 8], [16, 1]))  # its loss is a mean


def train(data: list[Row], device: torch.device) -> tuple[torch.Tensor, torch.nn.Module]:
    model = make_model().to(device)
    tables = model.model.sparse_arch.embedding_bag_collection
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": LEARNING_RATE})
    on_rank = {name: table_wise(number % dist.get_world_size()) for number, name in enumerate(FEATURES)}
    plan = {"model.sparse_arch.embedding_bag_collection": construct_module_sharding_plan(tables, on_rank)}
    model = DistributedModelParallel(model, device=device, plan=ShardingPlan(plan))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.SGD(dense.values(), lr=LEARNING_RATE)
    # before: pipeline = TrainPipelineSparseDist(model, optimizer, device)
    pipeline = TrainPipelineFactory.create(  # balancing
        "native", model, optimizer, device, batch_shuffler=ClickShuffler(), loss_reduction="mean"
    )
    batches, losses = iter(DataLoader(data, batch_size=8, collate_fn=collate)), []
    while True:
        try:
            loss, _, clicked = pipeline.progress(batches)
        except StopIteration:  # on all ranks in the same call
            break
        clicked = clicked[: pipeline.num_samples]  # without a copied row  # balancing
        losses.append(torch.stack([loss * len(clicked), torch.tensor(len(clicked), device=device)]))
    sums = torch.stack(losses)  # losses and rows of this rank; next, summed over all ranks
    dist.all_reduce(sums)
    return sums[:, 0] / sums[:, 1], model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    show_first_cause_only()  # balancing
    rank = dist.get_rank()
    losses, _ = train([draw(rank, row) for row in range(157 - 3 * rank)], torch.device("cpu"))
    for loss in losses if rank == 0 else ():
        print(f"loss {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
