"""Samples with any number of loss tokens in batches of many types, and a model that learns to score them.

`trained` runs steps on the ranks of a pool, and `check_trained` compares them with one process that has the
whole batches: losses, loss tokens, scores of samples, and what the steps change in the parameters.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import BatchShuffler, IdentityShuffler, ShufflePlan
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.shufflers import FieldShuffler
from tests.commons.pipeline.click_models import DIM, KEYS, NUM_IDS, Clicks, sharding, shards_of
from tests.commons.pipeline.ranking_pipelines import CPU, pipeline_of, steps_of

MOST_TARGETS = 4
RATE, TABLE_RATE = 0.1, 1.0  # so large that the rounding of a weight does not show in its change


@dataclass(frozen=True)
class Inner:
    ids: dict[str, dict[str, KeyedJaggedTensor]]
    note: str = "plain"


@dataclass
class Nested:
    sparse: Inner
    targets: tuple[JaggedTensor, ...]
    scale: torch.Tensor  # shared


class Named(NamedTuple):
    features: KeyedJaggedTensor
    targets: JaggedTensor


@dataclass(kw_only=True)
class Based(BaseBatch):
    targets: JaggedTensor

    def num_loss_tokens(self) -> torch.Tensor:
        return self.targets.lengths().long()


def _based(features: KeyedJaggedTensor, targets: JaggedTensor) -> Based:
    """Returns a batch with a row of padding."""
    rows = features.stride()
    lengths = nn.functional.pad(features.lengths().view(len(KEYS), rows), (0, 1)).view(-1)
    return Based(
        features=KeyedJaggedTensor(KEYS, features.values(), lengths=lengths),
        batch_size=rows + 1,
        actual_batch_size=rows,
        feature_to_max_seqlen={},
        targets=JaggedTensor(targets.values(), lengths=nn.functional.pad(targets.lengths(), (0, 1))),
    )


def _of_torchrec(features: KeyedJaggedTensor, targets: JaggedTensor) -> TorchRecBatch:
    return TorchRecBatch(targets.to_padded_dense(MOST_TARGETS), features, targets.lengths())


def _read_torchrec(batch: TorchRecBatch) -> tuple[KeyedJaggedTensor, JaggedTensor]:
    return batch.sparse_features, JaggedTensor.from_dense_lengths(batch.dense_features, batch.labels)


# For each kind how to make a batch of ids and targets, and how to read both of them.
Parts = tuple[Any, Any]
MAKE: dict[str, Callable[[KeyedJaggedTensor, JaggedTensor], Any]] = {
    "dict": lambda features, targets: {"features": features, "more": {"targets": targets}, "name": "train"},
    "dataclass": lambda features, targets: Nested(
        Inner({"ids": {"all": features}}), (targets,), torch.tensor([1.0, 1.0, 1.0])
    ),
    "named tuple": Named,
    "torchrec": _of_torchrec,
    "base": _based,
}
READ: dict[str, Callable[[Any], Parts]] = {
    "dict": lambda batch: (batch["features"], batch["more"]["targets"]),
    "dataclass": lambda batch: (batch.sparse.ids["ids"]["all"], batch.targets[0]),
    "named tuple": lambda batch: (batch[0], batch[1]),
    "torchrec": _read_torchrec,
    "base": lambda batch: (batch.features, batch.targets),
}
# Dicts in which each sample's losses have a weight, of about this size.
WEIGHTED = {"small weights": 1e-3, "weights": 1.0, "large weights": 1e6}
SHARED = {"dataclass": ("scale",)}


def read(kind: str, batch: Any) -> Parts:
    """Returns ids and targets of a batch."""
    return READ["dict" if kind in WEIGHTED else kind](batch)


def draw(kind: str, samples: Sequence[int]) -> Any:
    """A batch of samples, each drawn by its number; one in seven has no targets."""
    rngs = [np.random.default_rng((7, sample)) for sample in samples]
    ids = [[rng.integers(0, NUM_IDS, int(rng.integers(1, 9))) for rng in rngs] for _ in KEYS]
    targets = [
        rng.normal(size=0 if sample % 7 == 5 else int(rng.integers(1, MOST_TARGETS + 1)))
        for rng, sample in zip(rngs, samples, strict=True)
    ]

    def flat(rows: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        return torch.from_numpy(np.concatenate(rows)), lengths

    values, lengths = flat([row for of_key in ids for row in of_key])
    labels, label_lengths = flat(targets)
    features = KeyedJaggedTensor(KEYS, values, lengths=lengths)
    jagged = JaggedTensor(labels.float(), lengths=label_lengths)
    if kind not in WEIGHTED:
        return MAKE[kind](features, jagged)
    weights = WEIGHTED[kind] * torch.tensor([rng.uniform(0.1, 2.0) for rng in rngs], dtype=torch.float64)
    return {**MAKE["dict"](features, jagged), "weight": weights}


class Scorer(Clicks):
    """A regression of each target on the sample's mean embeddings."""

    def __init__(self, kind: str, reduction: str) -> None:
        super().__init__()
        self.head = ScoringHead(reduction)
        self._kind = kind

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss, and the score of each row."""
        features, targets = read(self._kind, batch)
        weights = batch["weight"] if self._kind in WEIGHTED else None
        num_samples = batch.num_samples if self._kind == "base" else None
        return self.head(self.tables(features), features, targets, weights, num_samples)


class ScoringHead(nn.Module):
    """Reduces losses as told.

    A row of padding would have a loss: it divides by the length, and takes each row for a sample.
    """

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(2 * DIM, 8), nn.Tanh(), nn.Linear(8, 1))
        self.reduction = reduction

    def forward(
        self, pooled: Any, features: Any, targets: Any, weights: torch.Tensor | None, num_samples: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = features.lengths().view(len(KEYS), -1).sum(0)
        if num_samples is not None:  # only such a batch has padding rows
            lengths = lengths.clamp(min=1)
        scores = self.linear(torch.tanh(pooled.values() / lengths[:, None])).squeeze(1)
        counts = targets.lengths().long()
        losses = (scores.repeat_interleave(counts) - targets.values()) ** 2
        if weights is not None:
            weights = weights.repeat_interleave(counts)
            losses = losses * weights
        if num_samples is not None:
            losses = losses[: int(counts[:num_samples].sum())]
        tokens = torch.tensor(float(len(losses))) if weights is None else weights.sum()
        return self._reduced(losses, tokens), scores.detach()

    def _reduced(self, losses: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.reduction == "sum":
            return losses
        if self.reduction == "mean":
            return losses.sum() / tokens.clamp(min=1e-9)  # a part may have none
        totals = all_reduce(torch.stack([losses.sum(), tokens]))
        return totals[0] / totals[1]


class ScoredShuffler(FieldShuffler):
    """Costs are squared lengths, which are int32 in the batch."""

    def __init__(self, kind: str, process_group: Any = None, **settings: Any) -> None:
        self.shared_fields = SHARED.get(kind, ())
        self._kind = kind
        super().__init__(process_group, **settings)

    def get_workloads(self, batch: Any) -> torch.Tensor:
        return (read(self._kind, batch)[0].lengths().view(len(KEYS), -1) ** 2).sum(0)

    def get_loss_tokens(self, batch: Any) -> torch.Tensor:
        return loss_tokens_of(self._kind, batch)


class UnmovedShuffler(IdentityShuffler):
    """Leaves the samples where they are, and counts their targets."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        super().__init__()

    def get_loss_tokens(self, batch: Any) -> torch.Tensor:
        return loss_tokens_of(self._kind, batch)


def loss_tokens_of(kind: str, batch: Any) -> torch.Tensor:
    """Returns targets of each row, or their weight."""
    lengths = read(kind, batch)[1].lengths()
    return batch["weight"] * lengths if kind in WEIGHTED else lengths


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def on_whole_batch(samples: Sequence[int]) -> list[torch.Tensor]:
    """Gradients of the mean loss over all loss tokens, in one process on the whole batch."""
    model = Scorer("dict", "mean")
    model(draw("dict", samples))[0].backward()
    return gradients_of(model)


def samples_of(rank: int, rows: Sequence[int], step: int = 0) -> list[int]:
    """The numbers of the samples that a rank loads."""
    first = 1000 * step + sum(rows[:rank])
    return list(range(first, first + rows[rank]))


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def sgd(model: Scorer) -> Any:
    return torch.optim.SGD(model.head.parameters(), RATE)


@dataclass(frozen=True)
class Partner:
    """Prepares, shards and trains a model, with a tolerance for the difference from one process."""

    prepare: Callable[[Scorer], Any] = lambda model: None
    shard: Callable[[Scorer], Any] | None = None
    optimizer: Callable[[Scorer], Any] = sgd
    scheduler: Callable[[Any], Any] | None = None
    tolerance: float = 1e-5


ALONE = Partner()


@dataclass(frozen=True)
class Run:
    """The samples that each rank loads in each step, and how a pipeline trains on them.

    The settings are of the shuffler, or None for the identity; tables may be sharded by "table" or "row".
    """

    kind: str = "dict"
    reduction: str = "mean"
    rows: Sequence[Sequence[int]] = ((6, 5), (3, 2))
    name: str = "none"
    settings: Mapping[str, Any] | None = field(default_factory=dict)
    sharded: str = ""

    def shuffler(self) -> BatchShuffler:
        if self.settings is None:
            return UnmovedShuffler(self.kind)
        # Extensions serve one shuffler each, and settings make several.
        return ScoredShuffler(self.kind, **copy.deepcopy(dict(self.settings)))

    def batches(self) -> list[Any]:
        """Returns this rank's batches; a rank that has no samples in the last steps has none for them."""
        mine = [samples_of(dist.get_rank(), rows, step) for step, rows in enumerate(self.rows)]
        return [draw(self.kind, samples) for samples in mine if samples]


@dataclass
class Trained:
    """Losses and loss tokens of steps, samples of this rank with their scores, and its parameters."""

    losses: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    scores: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    parameters: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)


# Of a shuffler, a plan and the model's output: numbers of samples, and a score of each.
Read = Callable[[BatchShuffler, ShufflePlan, Any], tuple[list[int], torch.Tensor]]


def as_computed(shuffler: BatchShuffler, plan: ShufflePlan, output: Any) -> tuple[list[int], torch.Tensor]:
    """Returns the numbers of this rank's samples, and the score of each."""
    numbers = plan.computed_by(dist.get_rank()).tolist()
    return numbers, output[: len(numbers)]


def trained(run: Run, of_output: Read = as_computed, partner: Partner = ALONE) -> Trained:
    """Trains a model on this rank's batches. Collective."""
    model = Scorer(run.kind, run.reduction)
    partner.prepare(model)
    if partner.shard:
        partner.shard(model)
    if run.sharded:
        apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": TABLE_RATE})
        plan = sharding(model.tables, run.sharded == "row")
        on_ranks = DistributedModelParallel(
            model, device=CPU, plan=plan, init_data_parallel=partner.shard is None
        )
        optimizer = partner.optimizer(model)
    else:
        on_ranks = ddp(model)
        tables = {"params": list(model.tables.parameters()), "lr": TABLE_RATE}
        optimizer = torch.optim.SGD([tables, {"params": list(model.head.parameters())}], RATE)
    scheduler = partner.scheduler(optimizer) if partner.scheduler else None
    shuffler, result = run.shuffler(), Trained()
    pipeline = pipeline_of(run.name, on_ranks, optimizer, shuffler, run.reduction)
    for loss_sum, tokens, output in steps_of(pipeline, run.batches()):
        assert pipeline.num_samples == len(pipeline.plan.computed_by(dist.get_rank()))
        dist.all_reduce(loss_sum)
        result.losses.append(float(loss_sum) / max(tokens, 1e-9))
        result.tokens.append(tokens)
        result.scores.append(of_output(shuffler, pipeline.plan, output))
        result.parts.append(len(output) if isinstance(output, list) else 1)
        if scheduler:
            scheduler.step()
    result.parameters = shards_of(on_ranks if run.sharded else model)
    return result


def trained_alone(run: Run, partner: Partner = ALONE) -> Trained:
    """Trains a model in one process on the whole batches."""
    model = Scorer(run.kind, "mean")
    partner.prepare(model)
    tables, optimizer = torch.optim.SGD(model.tables.parameters(), TABLE_RATE), partner.optimizer(model)
    scheduler = partner.scheduler(optimizer) if partner.scheduler else None
    result = Trained()
    for step, rows in enumerate(run.rows):
        batch = draw(run.kind, range(1000 * step, 1000 * step + sum(rows)))
        loss, scores = model(batch)
        model.zero_grad()
        loss.backward()
        tables.step(), optimizer.step()
        if scheduler:
            scheduler.step()
        result.losses.append(float(loss.detach()))
        result.tokens.append(float(loss_tokens_of(run.kind, batch).sum()))
        result.scores.append((list(range(sum(rows))), scores[: sum(rows)]))
    result.parameters = shards_of(model)
    return result


def check_trained(results: Sequence[Trained], run: Run, partner: Partner = ALONE) -> None:
    """Checks that the ranks have learned what one process learns with the whole batches."""
    expected, start = trained_alone(run, partner), shards_of(Scorer(run.kind, "mean"))
    for step, (numbers, scores) in enumerate(expected.scores):
        of_ranks = [of_rank.scores[step] for of_rank in results]
        order = [number for of_rank, _ in of_ranks for number in of_rank]
        assert sorted(order) == numbers, run
        got = torch.cat([of_rank for _, of_rank in of_ranks])
        torch.testing.assert_close(got, scores[order], rtol=partner.tolerance, atol=partner.tolerance)
    for of_rank in results:
        assert of_rank.losses == pytest.approx(expected.losses, rel=partner.tolerance), run
        assert of_rank.tokens == pytest.approx(expected.tokens, rel=1e-12), run
        for (name, row), got in of_rank.parameters.items():
            rows = slice(row, row + len(got))
            whole, before = expected.parameters[name, 0][rows], start[name, 0][rows]
            difference, change = float((got - whole).norm()), float((whole - before).norm())
            assert difference <= partner.tolerance * change, (run, name, difference / change)


def on_ranks(runs: Sequence[Run], of_output: Read = as_computed) -> list[Trained]:
    return [trained(run, of_output) for run in runs]


def check_runs(pool: Any, runs: Sequence[Run], of_output: Read = as_computed) -> list[list[Trained]]:
    """Trains on a pool's ranks, and compares each run with one process; returns the results of each."""
    of_runs = [list(results) for results in zip(*pool.run(on_ranks, runs, of_output), strict=True)]
    for run, results in zip(runs, of_runs, strict=True):
        check_trained(results, run)
    return of_runs
