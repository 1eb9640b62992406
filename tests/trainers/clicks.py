"""Data and model of the programs: whether a user, after items viewed, clicks on the one shown."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.optim import Optimizer
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

LEARNING_RATE, ITEMS, WIDTH = 0.1, 200, 8
Row = tuple[torch.Tensor, torch.Tensor, float]  # items viewed, the item shown, whether it was clicked


mean_loss: Callable[..., torch.Tensor] = functional.binary_cross_entropy_with_logits


def draw(shard: int, row: int) -> Row:
    """Returns a sample of a shard of the data."""
    drawn = torch.Generator().manual_seed(1_000_003 * shard + row)
    count = int(torch.empty(()).log_normal_(2, 1.2, generator=drawn).clamp(1, 100))
    viewed, shown = (torch.randint(ITEMS, (ids,), generator=drawn) for ids in (count, 1))
    return viewed, shown, float(shown < 60)


def jagged(**ids: list[torch.Tensor]) -> KeyedJaggedTensor:
    """Returns each feature's ids of all rows."""
    lengths = torch.tensor([len(of_row) for of_feature in ids.values() for of_row in of_feature])
    values = torch.cat([of_row for of_feature in ids.values() for of_row in of_feature])
    return KeyedJaggedTensor(list(ids), values, lengths=lengths)


def make_tables() -> EmbeddingCollection:
    """Returns the table of items."""
    torch.manual_seed(1)
    return EmbeddingCollection([EmbeddingConfig(ITEMS, WIDTH, "item", feature_names=["viewed", "shown"])])


class Scorer(torch.nn.Module):
    """Turns embeddings into one logit per row; attention of a row to itself, divided by a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(2 * WIDTH, 1)

    def forward(self, found: Mapping[str, JaggedTensor]) -> torch.Tensor:
        attend = functional.scaled_dot_product_attention
        viewed = torch.stack([attend(x, x, x).sum(0) / 10 for x in found["viewed"].to_dense()])
        return self.out(torch.cat([viewed, found["shown"].values()], 1)).squeeze(1)


class ClickModel(torch.nn.Module):
    """Returns its mean loss, and what torchrec's `DLRMTrain` does."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.scorer = make_tables(), Scorer()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        logits = self.scorer(self.tables(batch.sparse_features))
        loss = mean_loss(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


def collate(rows: list[Row]) -> Batch:
    """Returns rows as torchrec's batch."""
    viewed, shown, clicked = map(list, zip(*rows, strict=True))
    ages = torch.tensor([[float(len(ids))] for ids in viewed])
    return Batch(ages, jagged(viewed=viewed, shown=shown), torch.tensor(clicked))


def shard(model: torch.nn.Module, device: torch.device) -> tuple[DistributedModelParallel, Optimizer]:
    """Shards a model's `tables` by row, updated in backward; returns it and SGD for its `scorer`."""
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": LEARNING_RATE})
    plan = construct_module_sharding_plan(model.tables, {"item": row_wise(compute_kernel="fused")})
    sharded = DistributedModelParallel(model.to(device), device=device, plan=ShardingPlan({"tables": plan}))
    return sharded, torch.optim.SGD(sharded.module.scorer.parameters(), lr=LEARNING_RATE)
