"""Batches other than `BaseBatch` in TorchRec's pipelines, with sharded tables and TorchRec's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.commons.distributed.shufflers import QuickShuffler
from tests.commons.pipeline.ranking_pipelines import CPU, pipeline_of, steps_of

STEPS = [(6, 5), (4, 4), (3, 2)]


class Pair(NamedTuple):
    features: KeyedJaggedTensor
    labels: torch.Tensor


@dataclass
class Deep:
    sparse: dict[str, dict[str, KeyedJaggedTensor]]
    labels: torch.Tensor


def _waves(weight: torch.Tensor) -> torch.Tensor:
    """Fills a table, the same sharded and whole: TorchRec discards the weights that a table has."""
    with torch.no_grad():
        return weight.copy_(torch.arange(weight.numel()).sin().view_as(weight))


class Clicks(nn.Module):
    """Looks up pooled tables at the top level; a subclass reads its kind of batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}", num_embeddings=30, embedding_dim=8, feature_names=[name], init_fn=_waves
            )
            for name in "ab"
        ]
        self.tables = EmbeddingBagCollection(tables)
        self.head = Head()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 1)

    def forward(self, pooled: Any, labels: torch.Tensor) -> torch.Tensor:
        scores = self.linear(torch.tanh(pooled.values())).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, labels)


class OfTorchRecBatch(Clicks):
    def forward(self, batch):
        return self.head(self.tables(batch.sparse_features), batch.labels), None


class OfDict(Clicks):
    def forward(self, batch):
        return self.head(self.tables(batch["features"]), batch["labels"]), None


class OfPair(Clicks):
    def forward(self, batch):
        return self.head(self.tables(batch[0]), batch[1]), None


class OfDeep(Clicks):
    def forward(self, batch):
        return self.head(self.tables(batch.sparse["ids"]["all"]), batch.labels), None


KINDS = {
    "torchrec": (
        OfTorchRecBatch,
        lambda kjt, labels: TorchRecBatch(torch.zeros(len(labels), 1), kjt, labels),
    ),
    "dict": (OfDict, lambda kjt, labels: {"features": kjt, "labels": labels}),
    "pair": (OfPair, Pair),
    "deep": (OfDeep, lambda kjt, labels: Deep({"ids": {"all": kjt}}, labels)),
}


def _kjt_and_labels(first: int, rows: int, step: int):
    of_samples = [torch.Generator().manual_seed(100 * step + first + row) for row in range(rows)]
    lengths = torch.stack([torch.randint(1, 6, (2,), generator=g) for g in of_samples], 1)
    ids = [
        [torch.randint(30, (int(n),), generator=g) for n in lengths[:, row]]
        for row, g in enumerate(of_samples)
    ]
    values = torch.cat([of_row[key] for key in range(2) for of_row in ids])
    labels = torch.tensor([float(torch.rand((), generator=g) < 0.5) for g in of_samples])
    return KeyedJaggedTensor(["a", "b"], values, lengths=lengths.view(-1).int()), labels


class FirstFieldShuffler(QuickShuffler):
    """The workload is the sum of squared lengths in the first keyed field."""

    def get_workloads(self, batch):
        fields = self.sample_rows.per_sample_fields(batch)
        kjt = next(value for value in fields.values() if isinstance(value, KeyedJaggedTensor))
        return (kjt.lengths().view(2, -1) ** 2).sum(0)


def _trained(kind: str, pipeline_name: str, arguments: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Returns the global loss of each step, and this rank's parameters after the last."""
    model_type, make = KINDS[kind]
    model = model_type()
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.5})
    # Pooled row-wise tables need as many rows on every rank over gloo, which gathers equal sizes only.
    placed = {f"t_{name}": table_wise(rank=rank, compute_kernel="fused") for rank, name in enumerate("ab")}
    tables = construct_module_sharding_plan(model.tables, placed, device_type="cpu")
    sharded = DistributedModelParallel(model, device=CPU, plan=ShardingPlan({"tables": tables}))
    optimizer, shuffler = torch.optim.SGD(model.head.parameters(), lr=0.5), FirstFieldShuffler(verify=True)
    pipeline = pipeline_of(pipeline_name, sharded, optimizer, shuffler, "mean", **arguments)
    rank = dist.get_rank()
    batches = [make(*_kjt_and_labels(sum(rows[:rank]), rows[rank], step)) for step, rows in enumerate(STEPS)]
    losses = []
    for loss_sum, tokens, _ in steps_of(pipeline, batches):
        dist.all_reduce(loss_sum)
        losses.append(float(loss_sum) / tokens)
    parameters: dict[str, Any] = {}
    for name, value in sharded.state_dict().items():
        shards = value.local_shards() if hasattr(value, "local_shards") else None
        parameters[name] = [value.clone()] if shards is None else [shard.tensor.clone() for shard in shards]
    return losses, parameters


def _alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the same for one process with the whole batches."""
    model = OfDict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step, rows in enumerate(STEPS):
        kjt, labels = _kjt_and_labels(0, sum(rows), step)
        loss, _ = model({"features": kjt, "labels": labels})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "pipeline_name", "arguments"),
    [
        ("torchrec", "native", {}),
        ("dict", "native", {"pipeline_postproc": True}),
        ("pair", "native", {"enqueue_batch_after_forward": True}),
        ("deep", "native", {"dmp_collection_sync_interval_batches": None, "apply_jit": False}),
        ("deep", "none", {}),
    ],
)
def test_any_batch_trains_in_a_pipeline_as_in_one_process(pools, kind, pipeline_name, arguments):
    losses, parameters = _alone()
    results = pools(2).run(_trained, kind, pipeline_name, arguments)
    for got_losses, _ in results:
        assert got_losses == pytest.approx(losses, rel=1e-5)
    for name, expected in parameters.items():
        for got in [part for _, of_rank in results for part in of_rank[name]]:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("custom_model_fwd", "the stage calls the model"),
        ("enable_inplace_copy_batch", "it copies batches past the exchange"),
    ],
)
def test_arguments_that_bypass_the_stage_are_refused(name, reason):
    with pytest.raises(ValueError, match=f'pipeline "native" takes no {name}: {reason}'):
        pipeline_of("native", OfDict(), None, None, **{name: True})
