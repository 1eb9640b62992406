"""Models in micro-batches that are tables alone, or look up features that are no field of the batch."""

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
from tests.commons.extensions.micro_batches.internals import LookedUp
from tests.commons.pipeline.click_models import Clicks, sharding, shards_of
from tests.commons.pipeline.ranking_pipelines import CPU, pipeline_of
from tests.commons.pipeline.scored_samples import ScoredShuffler, Scorer, draw
from tests.on_ranks import on_ranks


class TablesAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = Clicks().tables
        self.same = nn.ModuleDict({"tables": self.tables})

    def forward(self, batch):
        return self.tables(batch.features).values()[: batch.num_samples] ** 2, None


@pytest.mark.parametrize("name", ["none", "native"])
@on_ranks(2)
def test_a_model_of_tables_alone_trains_where_a_rank_has_fewer_samples(name):
    trained = []
    for cap in (None, 20):
        model = TablesAlone()
        # By the sharder: with an optimizer in the backward, torch 2.9 asks for a stream without a GPU.
        sharder = EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0}
        )
        plan = sharding(model.tables, False, sharder)
        sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
        before = shards_of(sharded)
        # TorchRec 1.4 shards a module under its first name only; nothing looks up what the second one keeps.
        state = sharded.state_dict().items()
        tables = {name for name, value in state if hasattr(value, "local_shards") and value.local_shards()}
        shuffler = IdentityShuffler(extensions=in_micro_batches(cap))
        pipeline = pipeline_of(name, sharded, sharded.fused_optimizer, shuffler)
        pipeline.progress(iter([draw("base", range(6, 12 if dist.get_rank() else 7))]))
        pipeline.reset()
        assert (pipeline.report.extensions.get("micro_batches", 1) > 1) == (cap is not None)
        trained.append(shards_of(sharded))
    changed = {name for name, row in before if not torch.equal(before[name, row], trained[0][name, row])}
    assert tables and changed == tables
    torch.testing.assert_close(*trained)


def test_gradients_of_looked_up_tensors_come_to_their_rows_past_copies_of_a_row():
    # The third part has no samples, and runs copies of the first row, whose loss counts for nothing.
    parts, weights = [torch.tensor(rows) for rows in ([0, 3], [2, 1], [0, 0, 0])], (1.0, 1.0, 0.0)
    given = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    looked_up = LookedUp((given, None), parts)
    for number in (2, 0, 1):
        part, none = looked_up.part(number)
        (weights[number] * part.square().sum()).backward()
        (tensor,) = looked_up.tensors
        tensor.collect_gradient()
        assert none is None
    torch.testing.assert_close(tensor.gradient, 2 * given.detach())


class Rebuilding(Scorer):
    def forward(self, batch):
        features = batch["features"]
        rebuilt = KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths())
        return self.head(self.tables(rebuilt), features, batch["more"]["targets"], None, None)


@on_ranks(2)
def test_features_that_are_no_field_of_the_batch_are_named():
    model, shuffler = Rebuilding("dict", "mean"), ScoredShuffler("dict", extensions=in_micro_batches(12))
    sharded = DistributedModelParallel(model, device=CPU, plan=sharding(model.tables, False))
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.5)
    pipeline = pipeline_of("none", sharded, optimizer, shuffler, "mean")
    error = error_of(pipeline.progress, iter([draw("dict", range(6))]))
    pipeline.reset()
    assert error.startswith("RuntimeError: ") and "KeyedJaggedTensor that is no field of the batch" in error
