"""Custom batches and models in micro-batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import IdentityShuffler
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.extensions.micro_batches.divided import in_micro_batches
from tests.commons.pipeline.click_models import (
    Clicks,
    FirstFieldShuffler,
    check_trained,
    kjt_and_labels,
    padded_batch,
    sharding,
    shards_of,
    trained,
)
from tests.commons.pipeline.ranking_pipelines import CPU, pipeline_of


@pytest.mark.parametrize(
    ("kind", "pipeline_name", "cap"),
    [
        ("dict", "native", 12),
        ("padded", "native", 12),
        ("padded", "none", 12),
        ("padded", "native", 10**6),
        ("padded", "none", 10**6),
    ],
)
def test_any_batch_trains_in_micro_batches_as_in_one_process(pools, kind, pipeline_name, cap):
    settings = {"extensions": in_micro_batches(cap)}
    results = pools(2).run(trained, kind, pipeline_name, {}, settings, None)
    check_trained(results)
    assert all((count > 1) == (cap == 12) for *_, count in results)


class TablesAlone(nn.Module):
    """Nothing but tables, which have a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Clicks().tables
        self.same = nn.ModuleDict({"tables": self.tables})

    def forward(self, batch):
        return self.tables(batch.features).values()[: batch.num_samples] ** 2, None


def _compare_tables_alone(name: str) -> None:
    trained = []
    for cap in (None, 20):
        model = TablesAlone()
        # By the sharder: with an optimizer in the backward, torch 2.9 asks for a stream without a GPU.
        sharder = EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0}
        )
        plan = sharding(model.tables, True, sharder)
        sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
        before = shards_of(sharded)
        # TorchRec 1.4 shards a module under its first name only; nothing looks up what the second one keeps.
        state = sharded.state_dict().items()
        tables = {name for name, value in state if hasattr(value, "local_shards")}
        shuffler = IdentityShuffler(extensions=in_micro_batches(cap))
        pipeline = pipeline_of(name, sharded, sharded.fused_optimizer, shuffler)
        num_real = 12 if dist.get_rank() else 1
        pipeline.progress(iter([padded_batch(*kjt_and_labels(0, num_real, 0), num_padding=12 - num_real)]))
        pipeline.reset()
        assert (pipeline.report.extensions.get("micro_batches", 1) > 1) == (cap is not None)
        trained.append(shards_of(sharded))
    changed = {name for name, row in before if not torch.equal(before[name, row], trained[0][name, row])}
    assert len(tables) >= 2 and changed == tables
    torch.testing.assert_close(*trained)


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
def test_a_model_of_tables_alone_trains_where_a_rank_has_fewer_samples(pools, pipeline_name):
    pools(2).run(_compare_tables_alone, pipeline_name)


class Rebuilding(Clicks):
    """Looks up features that are no field of the batch."""

    def forward(self, batch):
        features = batch.features
        rebuilt = KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths())
        return self.head(self.tables(rebuilt), batch.labels, batch.num_samples)


def _hidden_features() -> str:
    model, shuffler = Rebuilding(), FirstFieldShuffler(extensions=in_micro_batches(12))
    sharded = DistributedModelParallel(model, device=CPU, plan=sharding(model.tables, True))
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.5)
    pipeline = pipeline_of("none", sharded, optimizer, shuffler, "mean")
    error = error_of(pipeline.progress, iter([padded_batch(*kjt_and_labels(0, 6, 0))]))
    pipeline.reset()
    return error


def test_features_that_are_no_field_of_the_batch_are_named(pools):
    for message in pools(2).run(_hidden_features):
        assert message.startswith("RuntimeError: ")
        assert "is called with a KeyedJaggedTensor that is no field of the batch" in message
