"""Ids received per rank and table are those counted by hand; test_balance_meter.py has a training's."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig

from commons.received_ids import ReceivedIds, received_figures, sums_by_key
from tests.on_ranks import on_ranks


class Tables(nn.Module):
    def __init__(self, pooled: bool) -> None:
        super().__init__()
        config, collection = (
            (EmbeddingBagConfig, EmbeddingBagCollection) if pooled else (EmbeddingConfig, EmbeddingCollection)
        )
        features = {"rows": ["a", "b"], "one": ["c"], "columns": ["d"], "copies": ["a", "d"]}
        configs = [
            config(name=name, num_embeddings=20, embedding_dim=8, feature_names=of)
            for name, of in features.items()
        ]
        self.tables = collection(tables=configs)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.tables(features)


@pytest.mark.parametrize("pooled", [False, True])
@on_ranks(2)
def test_each_sharding_counts_what_it_sends_to_a_rank(pooled):
    sharder: Any = (EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder)(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    )
    model = Tables(pooled)
    shardings = {
        "rows": row_wise(compute_kernel="fused"),
        "one": table_wise(rank=1, compute_kernel="fused"),
        "columns": column_wise(ranks=[0, 1], compute_kernel="fused"),
        "copies": data_parallel(),
    }
    plan = construct_module_sharding_plan(model.tables, shardings, sharder=sharder, device_type="cpu")
    made = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )
    received = ReceivedIds(made)
    rank = dist.get_rank()
    # Each rank has 3 + rank ids of a, of which one is in the second half, 2 of b, 4 of c, and 1 of d.
    lengths = torch.tensor([3 + rank, 0, 1, 1, 4, 0, 0, 1])
    ids = torch.tensor([0, 19, *[1] * (1 + rank), 2, 19, *range(5)])
    features = KeyedJaggedTensor(["a", "b", "c", "d"], ids, lengths=lengths)
    for _ in range(2):
        made(features)
    first = {"rows": 2 * (5 + 2), "columns": 2 * 2, "copies": 2 * 4}
    second = {"rows": 2 * (2 + 2), "one": 2 * 8, "columns": 2 * 2, "copies": 2 * 5}
    assert received.take() == (second if rank else first)
    assert set(received.take().values()) == {0}


def test_figures_count_a_table_that_a_rank_does_not_have_as_none():
    figures = received_figures([{"a": 6}, {"a": 2, "b": 4}], 2)
    assert figures["ids_received"] == [3, 3] and figures["ids_imbalance"] == 1
    assert figures["ids_received/b"] == [0, 2] and figures["ids_imbalance/b"] == 2
    assert received_figures([{"a": 0}, {}], 1)["ids_imbalance/a"] == 1


def test_keys_with_unequal_rows_are_summed_by_key():
    lengths, strides = torch.tensor([3, 0, 2, 4]), [[1, 2], [1, 0]]
    features = KeyedJaggedTensor(
        ["a", "b"], torch.arange(9), lengths=lengths, stride_per_key_per_rank=strides
    )
    assert sums_by_key(features).tolist() == [5, 4]


def test_a_model_without_sharded_tables_is_refused():
    with pytest.raises(ValueError, match="count_ids=True counts the ids of sharded tables"):
        ReceivedIds(nn.Linear(1, 1))
