"""Models with pooled tables, which are sharded by table or by row."""

from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

NUM_IDS, DIM, KEYS = 30, 8, ["a", "b"]


def _waves(weight: torch.Tensor) -> torch.Tensor:
    """Fills a table, or either half of its rows; TorchRec discards the weights that a table has."""
    with torch.no_grad():
        return weight.copy_((torch.arange(weight.numel()) % (NUM_IDS // 2 * DIM)).sin().view_as(weight))


class Clicks(nn.Module):
    """Has pooled tables; a subclass reads its kind of batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}",
                num_embeddings=NUM_IDS,
                embedding_dim=DIM,
                feature_names=[name],
                init_fn=_waves,
            )
            for name in KEYS
        ]
        self.tables = EmbeddingBagCollection(tables)


def sharding(tables: EmbeddingBagCollection, row_wise_tables: bool, sharder: Any = None) -> Any:
    # Pooled row-wise tables need as many rows on every rank over gloo, which gathers equal sizes only.
    placed = {
        f"t_{name}": row_wise(compute_kernel="fused")
        if row_wise_tables
        else table_wise(rank=rank, compute_kernel="fused")
        for rank, name in enumerate(KEYS)
    }
    plan = construct_module_sharding_plan(tables, placed, sharder=sharder, device_type="cpu")
    return ShardingPlan({"tables": plan})


def shards_of(model: nn.Module) -> dict[tuple[str, int], torch.Tensor]:
    """Returns this rank's parts of the parameters, by name and first row."""
    shards = {}
    for name, value in model.state_dict().items():
        local = value.to_local() if hasattr(value, "to_local") else value
        if hasattr(local, "local_offsets"):  # of tables in several replicas
            for offsets, rows in zip(local.local_offsets(), local.local_shards(), strict=True):
                shards[name, offsets[0]] = rows.clone()
        elif hasattr(value, "local_shards"):
            for shard in value.local_shards():
                shards[name, shard.metadata.shard_offsets[0]] = shard.tensor.clone()
        else:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            shards[name, 0] = whole.detach().clone()
    return shards
