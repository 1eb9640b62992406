"""Loss tokens that are weights, and means over none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commons.distributed import BatchShuffler, IdentityShuffler
from commons.extensions.micro_batches import MicroBatches
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.pipeline.ranking_pipelines import pipeline_of, steps_of
from tests.on_ranks import on_ranks

ROWS = 6


class Weighted(BatchShuffler):
    def get_workloads(self, batch):
        return batch["cost"]

    def get_loss_tokens(self, batch):
        return batch["weight"]


class Mean(torch.nn.Module):
    """Returns a weighted mean, or sum, of squared errors; `least` is what the mean divides by at least."""

    def __init__(self, reduction: str, least: float = 0.0) -> None:
        super().__init__()
        self.line = torch.nn.Linear(3, 1, dtype=torch.float64)
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, 0.3)
        self._reduction, self._least = reduction, least

    def forward(self, batch):
        errors = (self.line(batch["x"])[:, 0] - batch["y"]) ** 2 * batch["weight"]
        total, weights = errors.sum(), batch["weight"].sum().clamp(min=self._least)
        return (total if self._reduction == "sum" else total / weights), errors.detach()


def drawn(rank: int, weight: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    weights = torch.rand(ROWS, generator=generator, dtype=torch.float64) * weight
    return {"x": x, "y": x.sum(1), "weight": weights, "cost": torch.arange(ROWS) * (10 * rank + 1)}


def gradient_of_mean(batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The gradient of the weighted mean over all rows, on one process."""
    model = Mean("mean")
    model({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})[0].backward()
    return model.line.weight.grad


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
@on_ranks(2)
def test_the_gradient_is_that_of_the_weighted_mean_over_all_rows(reduction, scale):
    rank = dist.get_rank()
    batches = [drawn(0, 4 * scale), drawn(1, scale)]
    expected = gradient_of_mean(batches)
    shufflers = [
        Weighted(),
        Weighted(extensions=[MicroBatches(max_tokens=2)]),
        IdentityShuffler(get_workloads=lambda of: of["cost"], get_loss_tokens=lambda of: of["weight"]),
    ]
    for shuffler in shufflers:
        model = DistributedDataParallel(Mean(reduction))
        pipeline = pipeline_of("none", model, torch.optim.SGD(model.parameters(), 0.0), shuffler, reduction)
        pipeline.progress(iter([batches[rank]]))
        total = sum(batch["weight"].sum().item() for batch in batches)
        assert pipeline.loss_tokens == pytest.approx(total, rel=1e-12)
        assert torch.allclose(model.module.line.weight.grad, expected, rtol=1e-5)
    model, shuffler = DistributedDataParallel(Mean(reduction)), Weighted()
    plan = shuffler.plan(batches[rank])
    loss = shuffler.scale(model(shuffler.exchange(batches[rank], plan))[0], plan, reduction)
    loss.backward()
    assert torch.allclose(model.module.line.weight.grad, expected, rtol=1e-5)


@on_ranks(2)
def test_weights_have_to_be_finite_and_of_one_type():
    rank = dist.get_rank()
    for wrong in (-0.5, torch.nan, torch.inf):
        batch = drawn(rank, 1.0)
        batch["weight"][2] = wrong if rank else 1.0
        assert "Weighted.get_loss_tokens returned" in error_of(Weighted().plan, batch)
    batch = drawn(rank, 1.0)
    batch["weight"] = batch["weight"].long() if rank else batch["weight"]
    assert "dtype" in error_of(Weighted().plan, batch)


class Unweighted(Weighted):
    """Has loss tokens of one rank alone, and moves none of them."""

    def get_workloads(self, batch):
        return 0 * batch["cost"]


def unlabeled(rank: int, step: int) -> dict[str, torch.Tensor]:
    """One row of a step has a weight, so that the other rank has none."""
    batch = drawn(rank, float(step % 2 == rank))
    batch["weight"][1:] = 0.0
    return batch


@pytest.mark.parametrize("micro_batches", [False, True])
@on_ranks(2)
def test_a_mean_over_nothing_that_is_not_finite_is_an_error_on_all_ranks(micro_batches):
    rank = dist.get_rank()

    def train(least: float, steps: int) -> int:
        extensions = [MicroBatches(max_tokens=100)] if micro_batches else []
        model = DistributedDataParallel(Mean("mean", least))
        shuffler = Unweighted(extensions=extensions)
        pipeline = pipeline_of("none", model, torch.optim.SGD(model.parameters(), 0.0), shuffler, "mean")
        trained = len(list(steps_of(pipeline, [unlabeled(rank, step) for step in range(steps)])))
        assert bool(model.module.line.weight.grad.isfinite().all())
        return trained

    assert train(1e-9, 3) == 3
    with pytest.raises(FloatingPointError, match="has no loss tokens in a step"):
        train(0.0, 4)
    with pytest.raises(FloatingPointError, match="rank 1 has no loss tokens"):
        train(0.0, 1)


@on_ranks(2)
def test_scale_raises_it_on_the_rank_without_loss_tokens():
    rank, shuffler = dist.get_rank(), Unweighted()
    batch, model = unlabeled(rank, 0), Mean("mean")
    plan = shuffler.plan(batch)
    loss = model(shuffler.exchange(batch, plan))[0]
    if rank == 0:
        assert bool(shuffler.scale(loss, plan, "mean").isfinite())
    else:
        assert "MeanOfNoneError" in error_of(shuffler.scale, loss, plan, "mean")
