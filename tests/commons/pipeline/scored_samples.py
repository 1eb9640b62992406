"""Samples with any number of loss tokens, in batches of many types, and a model that scores them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import IdentityShuffler
from commons.sequence_batch import BaseBatch, register_batch_type
from tests.commons.distributed.shufflers import FieldShuffler
from tests.commons.pipeline.ranking_pipelines import pipeline_of


@dataclass(frozen=True)
class Inner:
    ids: dict[str, KeyedJaggedTensor]
    note: str = "plain"


@dataclass
class Nested:
    sparse: Inner
    targets: tuple[JaggedTensor, ...]
    scale: torch.Tensor  # shared


class Named(NamedTuple):
    features: KeyedJaggedTensor
    targets: JaggedTensor


class Opaque:
    """Known by its adapter alone."""

    def __init__(self, features: KeyedJaggedTensor, targets: JaggedTensor) -> None:
        self._inside = features, targets

    def get(self) -> tuple[KeyedJaggedTensor, JaggedTensor]:
        return self._inside


register_batch_type(
    Opaque,
    parts=lambda batch: dict(zip(("features", "targets"), batch.get(), strict=True)),
    replaced=lambda batch, parts: Opaque(
        parts.get("features", batch.get()[0]), parts.get("targets", batch.get()[1])
    ),
)


@dataclass(kw_only=True)
class Based(BaseBatch):
    targets: JaggedTensor

    def num_loss_tokens(self) -> torch.Tensor:
        return self.targets.lengths().long()


def _tensordict(features: KeyedJaggedTensor, targets: JaggedTensor) -> TensorDict:
    def nested(jagged: JaggedTensor | KeyedJaggedTensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(jagged.values(), jagged.offsets().long())

    return TensorDict(
        {"features": nested(features), "user": {"targets": nested(targets)}}, batch_size=[features.stride()]
    )


# For each kind how to make a batch of ids and targets, and how to read both of them.
Parts = tuple[Any, Any]
MAKE: dict[str, Callable[[KeyedJaggedTensor, JaggedTensor], Any]] = {
    "dict": lambda features, targets: {"features": features, "more": {"targets": targets}, "name": "train"},
    "dataclass": lambda features, targets: Nested(
        Inner({"item": features}), (targets,), torch.tensor([1.0, 1.0, 1.0])
    ),
    "named tuple": Named,
    "list": lambda features, targets: [features, targets],
    "tensordict": _tensordict,
    "opaque": Opaque,
    "base": lambda features, targets: Based(features, features.stride(), {"item": 9}, targets=targets),
}
READ: dict[str, Callable[[Any], Parts]] = {
    "dict": lambda batch: (batch["features"], batch["more"]["targets"]),
    "dataclass": lambda batch: (batch.sparse.ids["item"], batch.targets[0]),
    "named tuple": lambda batch: tuple(batch),
    "list": lambda batch: tuple(batch),
    "tensordict": lambda batch: (_jagged(batch["features"]), _jagged(batch["user", "targets"])),
    "opaque": lambda batch: batch.get(),
    "base": lambda batch: (batch.features, batch.targets),
}
SHARED = {"dataclass": ("scale",)}


def _jagged(nested: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(nested.values(), lengths=nested.offsets().diff())


def draw(kind: str, samples: Sequence[int], most_targets: int = 4) -> Any:
    """A batch of samples, each drawn by its number; at least one has more than one target."""
    rngs = [np.random.default_rng((7, sample)) for sample in samples]
    ids = [rng.integers(0, 40, int(rng.integers(1, 9))) for rng in rngs]
    targets = [rng.normal(size=int(rng.integers(0, most_targets + 1))) for rng in rngs]

    def flat(rows: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        return torch.from_numpy(np.concatenate(rows)), lengths

    (values, lengths), (labels, label_lengths) = flat(ids), flat(targets)
    features = KeyedJaggedTensor(["item"], values, lengths=lengths)
    return MAKE[kind](features, JaggedTensor(labels.float(), lengths=label_lengths))


class Scorer(nn.Module):
    """A regression of each target on the sample's mean embedding.

    A row of padding would have a loss: it divides by the length, and takes each row for a sample.
    """

    def __init__(self, kind: str, reduction: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 8)
        self.head = nn.Linear(8, 1)
        self._kind, self._reduction = kind, reduction

    def losses(self, batch: Any) -> torch.Tensor:
        """`[loss tokens]`."""
        features, targets = READ[self._kind](batch)
        lengths = features.lengths().long()
        rows = torch.arange(len(lengths)).repeat_interleave(lengths)
        pooled = torch.zeros(len(lengths), 8).index_add(0, rows, self.table(features.values()))
        by = lengths.clamp(min=1) if self._kind == "base" else lengths  # only that one has padding rows
        scores = self.head(torch.tanh(pooled / by[:, None])).squeeze(1)
        losses = (scores.repeat_interleave(targets.lengths().long()) - targets.values()) ** 2
        return losses[: int(targets.lengths()[: batch.num_samples].sum())] if self._kind == "base" else losses

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        losses = self.losses(batch)
        if self._reduction == "sum":
            return losses, losses.detach()
        if self._reduction == "mean":
            return losses.mean(), losses.detach()
        totals = all_reduce(torch.stack([losses.sum(), torch.tensor(float(len(losses)))]))
        return totals[0] / totals[1], losses.detach()


class ScoredShuffler(FieldShuffler):
    """Costs are squared lengths, which are int32 in the batch."""

    def __init__(self, kind: str, **settings: Any) -> None:
        self.shared_fields = SHARED.get(kind, ())
        self._kind = kind
        super().__init__(**settings)

    def get_workloads(self, batch: Any) -> torch.Tensor:
        return READ[self._kind](batch)[0].lengths() ** 2

    def get_loss_tokens(self, batch: Any) -> torch.Tensor:
        return READ[self._kind](batch)[1].lengths()


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def on_whole_batch(samples: Sequence[int]) -> tuple[float, int, list[torch.Tensor]]:
    """Mean loss over all loss tokens, their number, and its gradients, in one process on the whole batch."""
    model = Scorer("list", "sum")
    losses = model.losses(draw("list", samples))
    losses.mean().backward()
    return float(losses.detach().mean()), len(losses), gradients_of(model)


def samples_of(rank: int, rows: Sequence[int], step: int = 0) -> list[int]:
    """The numbers of the samples that a rank loads."""
    first = 1000 * step + sum(rows[:rank])
    return list(range(first, first + rows[rank]))


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model


# (3, 2) and (6, 5): the ranks do not divide the rows. (1, 1, 0): a rank gets no sample at all.
UNEVEN = [(6, 5), (3, 2)]
WITHOUT_SAMPLES = (1, 1, 0)


def replicated_pipeline(model, reduction, shuffler):
    replicated = ddp(model)
    return pipeline_of(
        "none", replicated, torch.optim.SGD(replicated.parameters(), lr=0.0), shuffler, reduction
    )


def scored_pipeline(kind, reduction, **settings):
    # Extensions serve one shuffler each, and settings make several.
    shuffler = ScoredShuffler(kind, **copy.deepcopy(settings))
    return replicated_pipeline(Scorer(kind, reduction), reduction, shuffler)


def identity_pipeline(reduction):
    shuffler = IdentityShuffler(get_loss_tokens=lambda batch: batch["more"]["targets"].lengths())
    return replicated_pipeline(Scorer("dict", reduction), reduction, shuffler)


def ran(pipeline, batches):
    """Returns mean loss, loss tokens, gradients and samples of a step. Collective."""
    pipeline.progress(iter(batches))
    pipeline.reset()
    loss_sum, tokens = pipeline.loss_sum, pipeline.loss_tokens
    dist.all_reduce(loss_sum)
    return float(loss_sum) / max(tokens, 1), tokens, gradients_of(pipeline._model), pipeline.num_samples


def _step(kind, reduction, rows, settings):
    """Runs a step; with `settings` None, without balancing."""
    mine = samples_of(dist.get_rank(), rows)
    pipeline = (
        identity_pipeline(reduction) if settings is None else scored_pipeline(kind, reduction, **settings)
    )
    return ran(pipeline, [draw(kind, mine)] if mine else [])


def scored_steps(cases):
    return [_step(*case) for case in cases]


def check_scored(results, cases) -> None:
    """Checks that loss and gradients of each rank are those of one process with the whole batch."""
    for number, (_, _, rows, _) in enumerate(cases):
        loss, tokens, gradients = on_whole_batch(range(sum(rows)))
        assert sum(of_rank[number][3] for of_rank in results) == sum(rows)
        for of_rank in results:
            got_loss, got_tokens, got, _ = of_rank[number]
            assert got_tokens == tokens, cases[number]
            assert got_loss == pytest.approx(loss, rel=1e-5), cases[number]
            for one, other in zip(got, gradients, strict=True):
                assert float((one - other).norm()) <= 1e-5 * float(other.norm()), cases[number]
