"""Steps in which all losses of a rank have a weight of zero."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShuffler
from tests.commons.pipeline.ranking_pipelines import pipeline_of, steps_of
from tests.commons.pipeline.scored_samples import ddp


class WeightedShuffler(BatchShuffler):
    """Loss tokens are weights, and nothing moves."""

    def get_workloads(self, batch):
        return torch.zeros(len(batch["x"]), dtype=torch.int64)

    def get_loss_tokens(self, batch):
        return batch["weight"]


class WeightedMean(torch.nn.Module):
    """Divides the sum of its losses by their weights, or by the `least` if that is more."""

    def __init__(self, least: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self._least = least

    def forward(self, batch):
        losses = self.weight * batch["x"] * batch["weight"]
        return losses.sum() / batch["weight"].sum().clamp(min=self._least), losses.detach()


def weighted_rows(rank: int, step: int) -> dict[str, torch.Tensor]:
    """One row of a step has a weight, so that the other rank has none."""
    weight = torch.zeros(3, dtype=torch.float64)
    weight[0] = 0.5 * (step % 2 == rank)
    return {"x": torch.arange(1.0, 4.0, dtype=torch.float64), "weight": weight}


def check_means_over_none(extensions: list[Any]) -> None:
    """Checks that a mean over none is an error on all ranks, unless it is finite."""
    rank = dist.get_rank()

    def train(least: float, steps: int) -> int:
        model = ddp(WeightedMean(least))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        pipeline = pipeline_of(
            "none", model, optimizer, WeightedShuffler(extensions=copy.deepcopy(extensions)), "mean"
        )
        trained = len(list(steps_of(pipeline, [weighted_rows(rank, step) for step in range(steps)])))
        assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
        return trained

    assert train(1e-9, 3) == 3
    with pytest.raises(FloatingPointError, match="has no loss tokens in a step"):
        train(0.0, 4)
    with pytest.raises(FloatingPointError, match="rank 1 has no loss tokens"):
        train(0.0, 1)
