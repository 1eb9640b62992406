"""Custom batches and models in all pipelines, also in micro-batches, with pooled and sharded tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import IdentityShuffler
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.shufflers import FieldShuffler
from tests.commons.pipeline.ranking_pipelines import CPU, pipeline_of, steps_of

STEPS = [(6, 5), (4, 4), (3, 2)]
NUM_IDS, DIM = 30, 8


class Pair(NamedTuple):
    features: KeyedJaggedTensor
    labels: torch.Tensor


@dataclass
class Deep:
    sparse: dict[str, dict[str, KeyedJaggedTensor]]
    labels: torch.Tensor


@dataclass
class Padded(BaseBatch):
    """The loss is a mean over the real rows."""


def _waves(weight: torch.Tensor) -> torch.Tensor:
    """Fills a table, or either half of its rows; TorchRec discards the weights that a table has."""
    with torch.no_grad():
        return weight.copy_((torch.arange(weight.numel()) % (NUM_IDS // 2 * DIM)).sin().view_as(weight))


class Clicks(nn.Module):
    """Looks up pooled tables at the top level; a subclass reads its kind of batch."""

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
            for name in "ab"
        ]
        self.tables = EmbeddingBagCollection(tables)
        self.head = Head()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * DIM, 1)

    def forward(self, pooled: Any, labels: torch.Tensor, num_samples: int | None = None) -> Any:
        scores = self.linear(torch.tanh(pooled.values())).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        return losses[:num_samples].mean(), scores.detach()


class OfTorchRecBatch(Clicks):
    def forward(self, batch):
        return self.head(self.tables(batch.sparse_features), batch.labels)


class OfDict(Clicks):
    def forward(self, batch):
        return self.head(self.tables(batch["features"]), batch["labels"])


class OfPair(Clicks):
    def forward(self, batch):
        return self.head(self.tables(batch[0]), batch[1])


class OfDeep(Clicks):
    def forward(self, batch):
        return self.head(self.tables(batch.sparse["ids"]["all"]), batch.labels)


class OfPadded(Clicks):
    def forward(self, batch):
        return self.head(self.tables(batch.features), batch.labels, batch.num_samples)


def _padded(kjt: KeyedJaggedTensor, labels: torch.Tensor, num_padding: int = 1) -> Padded:
    lengths = nn.functional.pad(kjt.lengths().view(2, -1), (0, num_padding))
    return Padded(
        features=KeyedJaggedTensor(kjt.keys(), kjt.values(), lengths=lengths.view(-1)),
        batch_size=len(labels) + num_padding,
        actual_batch_size=len(labels),
        feature_to_max_seqlen={},
        labels=nn.functional.pad(labels, (0, num_padding)),
    )


KINDS = {
    "torchrec": (
        OfTorchRecBatch,
        lambda kjt, labels: TorchRecBatch(torch.zeros(len(labels), 1), kjt, labels),
    ),
    "dict": (OfDict, lambda kjt, labels: {"features": kjt, "labels": labels}),
    "pair": (OfPair, Pair),
    "deep": (OfDeep, lambda kjt, labels: Deep({"ids": {"all": kjt}}, labels)),
    "padded": (OfPadded, _padded),
}


def _kjt_and_labels(first: int, rows: int, step: int):
    of_samples = [torch.Generator().manual_seed(100 * step + first + row) for row in range(rows)]
    lengths = torch.stack([torch.randint(1, 6, (2,), generator=g) for g in of_samples], 1)
    ids = [
        [torch.randint(NUM_IDS, (int(n),), generator=g) for n in lengths[:, row]]
        for row, g in enumerate(of_samples)
    ]
    values = torch.cat([of_row[key] for key in range(2) for of_row in ids])
    labels = torch.tensor([float(torch.rand((), generator=g) < 0.5) for g in of_samples])
    return KeyedJaggedTensor(["a", "b"], values, lengths=lengths.view(-1).int()), labels


class FirstFieldShuffler(FieldShuffler):
    """The workload is the sum of squared lengths in the first keyed field."""

    def get_workloads(self, batch):
        fields = self.view(batch).fields
        kjt = next(value for value in fields.values() if isinstance(value, KeyedJaggedTensor))
        return (kjt.lengths().view(2, -1) ** 2).sum(0)


def _sharding(tables: EmbeddingBagCollection, row_wise_tables: bool, sharder: Any = None) -> Any:
    # Pooled row-wise tables need as many rows on every rank over gloo, which gathers equal sizes only.
    placed = {
        f"t_{name}": row_wise(compute_kernel="fused")
        if row_wise_tables
        else table_wise(rank=rank, compute_kernel="fused")
        for rank, name in enumerate("ab")
    }
    plan = construct_module_sharding_plan(tables, placed, sharder=sharder, device_type="cpu")
    return ShardingPlan({"tables": plan})


def _shards(sharded: nn.Module) -> dict[str, torch.Tensor]:
    """Returns this rank's parts of the parameters, by name and first row."""
    shards = {}
    for name, value in sharded.state_dict().items():
        if not hasattr(value, "local_shards"):
            shards[name, 0] = value.clone()
            continue
        for shard in value.local_shards():
            shards[name, shard.metadata.shard_offsets[0]] = shard.tensor.clone()
    return shards


def _trained(kind: str, pipeline_name: str, cap: int | None, arguments: dict[str, Any]) -> tuple[list, ...]:
    """Returns the loss of each step, this rank's scores, its parameters, and the most micro-batches."""
    model_type, make = KINDS[kind]
    model = model_type()
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.5})
    plan = _sharding(model.tables, kind == "padded")
    sharded = DistributedModelParallel(model, device=CPU, plan=plan)
    shuffler = FirstFieldShuffler(verify=True, max_tokens_per_micro_batch=cap)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.5)
    pipeline = pipeline_of(pipeline_name, sharded, optimizer, shuffler, "mean", **arguments)
    rank = dist.get_rank()
    batches = [make(*_kjt_and_labels(sum(rows[:rank]), rows[rank], step)) for step, rows in enumerate(STEPS)]
    losses, scores, counts = [], [], []
    for (loss_sum, tokens, output), rows in zip(steps_of(pipeline, batches), STEPS, strict=True):
        dist.all_reduce(loss_sum)
        losses.append(float(loss_sum) / tokens)
        scores.append(shuffler.unshuffle(output, pipeline.plan)[: rows[rank]])
        counts.append(pipeline.report.num_micro_batches)
    return losses, scores, _shards(sharded), max(counts)


def _alone() -> tuple[list[float], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the losses, scores and parameters of one process with the whole batches."""
    model = OfDict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, scores = [], []
    for step, rows in enumerate(STEPS):
        kjt, labels = _kjt_and_labels(0, sum(rows), step)
        loss, of_step = model({"features": kjt, "labels": labels})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        scores.append(of_step)
    return losses, scores, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "pipeline_name", "cap", "arguments"),
    [
        ("torchrec", "native", None, {}),
        ("dict", "native", None, {"pipeline_postproc": True}),
        ("pair", "native", None, {"enqueue_batch_after_forward": True}),
        ("deep", "native", None, {"dmp_collection_sync_interval_batches": None, "apply_jit": False}),
        ("deep", "none", None, {}),
        ("dict", "native", 12, {}),
        ("padded", "native", None, {}),
        ("padded", "native", 12, {}),
        ("padded", "none", 12, {}),
        ("padded", "native", 10**6, {}),
        ("padded", "none", 10**6, {}),
    ],
)
def test_any_batch_trains_in_a_pipeline_as_in_one_process(pools, kind, pipeline_name, cap, arguments):
    losses, scores, parameters = _alone()
    results = pools(2).run(_trained, kind, pipeline_name, cap, arguments)
    for of_step, expected in enumerate(scores):
        got = torch.cat([of_rank[of_step] for _, of_rank, _, _ in results])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for got_losses, _, shards, count in results:
        assert got_losses == pytest.approx(losses, rel=1e-5)
        assert (count > 1) == (cap == 12)
        for (name, row), got in shards.items():
            expected = parameters[name][row : row + len(got)] if row else parameters[name][: len(got)]
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


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
        plan = _sharding(model.tables, True, sharder)
        sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
        before = _shards(sharded)
        shuffler = IdentityShuffler(max_tokens_per_micro_batch=cap)
        pipeline = pipeline_of(name, sharded, sharded.fused_optimizer, shuffler)
        num_real = 12 if dist.get_rank() else 1
        pipeline.progress(iter([_padded(*_kjt_and_labels(0, num_real, 0), num_padding=12 - num_real)]))
        pipeline.reset()
        assert (pipeline.report.num_micro_batches > 1) == (cap is not None)
        trained.append(_shards(sharded))
    assert len(before) >= 2 and not any(map(torch.equal, before.values(), trained[0].values()))
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
    model, shuffler = Rebuilding(), FirstFieldShuffler(max_tokens_per_micro_batch=12)
    sharded = DistributedModelParallel(model, device=CPU, plan=_sharding(model.tables, True))
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.5)
    pipeline = pipeline_of("none", sharded, optimizer, shuffler, "mean")
    error = error_of(pipeline.progress, iter([_padded(*_kjt_and_labels(0, 6, 0))]))
    pipeline.reset()
    return error


def test_features_that_are_no_field_of_the_batch_are_named(pools):
    for message in pools(2).run(_hidden_features):
        assert message.startswith("RuntimeError: ")
        assert "is called with a KeyedJaggedTensor that is no field of the batch" in message


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
