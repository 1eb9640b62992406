"""Custom batches, models with pooled and sharded tables that take them, and their training in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import ShufflePlan
from commons.sequence_batch import BaseBatch
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


def padded_batch(kjt: KeyedJaggedTensor, labels: torch.Tensor, num_padding: int = 1) -> Padded:
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
    "padded": (OfPadded, padded_batch),
}


def kjt_and_labels(first: int, rows: int, step: int):
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


def sharding(tables: EmbeddingBagCollection, row_wise_tables: bool, sharder: Any = None) -> Any:
    # Pooled row-wise tables need as many rows on every rank over gloo, which gathers equal sizes only.
    placed = {
        f"t_{name}": row_wise(compute_kernel="fused")
        if row_wise_tables
        else table_wise(rank=rank, compute_kernel="fused")
        for rank, name in enumerate("ab")
    }
    plan = construct_module_sharding_plan(tables, placed, sharder=sharder, device_type="cpu")
    return ShardingPlan({"tables": plan})


def shards_of(sharded: nn.Module) -> dict[str, torch.Tensor]:
    """Returns this rank's parts of the parameters, by name and first row."""
    shards = {}
    for name, value in sharded.state_dict().items():
        if not hasattr(value, "local_shards"):
            shards[name, 0] = value.clone()
            continue
        for shard in value.local_shards():
            shards[name, shard.metadata.shard_offsets[0]] = shard.tensor.clone()
    return shards


def as_computed(shuffler: FieldShuffler, plan: ShufflePlan, output: Any) -> tuple[list[int], torch.Tensor]:
    """Returns the numbers of this rank's samples, and the score of each."""
    numbers = plan.computed_by(dist.get_rank()).tolist()
    return numbers, output[: len(numbers)]


def trained(
    kind: str,
    pipeline_name: str,
    arguments: dict[str, Any],
    settings: dict[str, Any],
    read: Callable[..., tuple[list[int], torch.Tensor]] | None = as_computed,
) -> tuple[list, ...]:
    """Returns the loss of each step, what `read` makes of its output, parameters, and most micro-batches."""
    model_type, make = KINDS[kind]
    model = model_type()
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.5})
    plan = sharding(model.tables, kind == "padded")
    sharded = DistributedModelParallel(model, device=CPU, plan=plan)
    shuffler = FirstFieldShuffler(**settings)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.5)
    pipeline = pipeline_of(pipeline_name, sharded, optimizer, shuffler, "mean", **arguments)
    rank = dist.get_rank()
    batches = [make(*kjt_and_labels(sum(rows[:rank]), rows[rank], step)) for step, rows in enumerate(STEPS)]
    losses, scores, counts = [], [], []
    for loss_sum, tokens, output in steps_of(pipeline, batches):
        dist.all_reduce(loss_sum)
        losses.append(float(loss_sum) / tokens)
        scores.append(None if read is None else read(shuffler, pipeline.plan, output))
        counts.append(len(output) if isinstance(output, list) else 1)
    assert len(losses) == len(STEPS)
    return losses, scores, shards_of(sharded), max(counts)


def _alone() -> tuple[list[float], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the losses, scores and parameters of one process with the whole batches."""
    model = OfDict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, scores = [], []
    for step, rows in enumerate(STEPS):
        kjt, labels = kjt_and_labels(0, sum(rows), step)
        loss, of_step = model({"features": kjt, "labels": labels})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        scores.append(of_step)
    return losses, scores, {name: value.detach() for name, value in model.state_dict().items()}


def check_trained(results: Sequence[tuple[list, ...]]) -> None:
    """Checks that losses, scores and parameters of `trained` on each rank are those of one process."""
    losses, scores, parameters = _alone()
    for step, expected in enumerate(scores):
        of_ranks = [of_rank[step] for _, of_rank, _, _ in results]
        if None in of_ranks:
            continue
        numbers = [number for of_rank, _ in of_ranks for number in of_rank]
        assert sorted(numbers) == list(range(len(expected)))
        got = torch.cat([of_rank for _, of_rank in of_ranks])
        torch.testing.assert_close(got, expected[numbers], rtol=1e-5, atol=1e-6)
    for got_losses, _, shards, _ in results:
        assert got_losses == pytest.approx(losses, rel=1e-5)
        for (name, row), got in shards.items():
            expected = parameters[name][row : row + len(got)] if row else parameters[name][: len(got)]
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
