"""How often a step walks over a batch, and makes its containers again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import BatchShuffler
from commons.sequence_batch import BaseBatch, register_batch_type
from tests.commons.pipeline.ranking_pipelines import pipeline_of
from tests.on_ranks import on_ranks

CALLS: Counter[str] = Counter()
STEPS, WARM_UP = 8, 3


class Costs:
    """A part of a batch that counts how often it is taken apart and made again."""

    def __init__(self, cost: torch.Tensor) -> None:
        self.cost = cost


def _parts(costs: Costs) -> dict[str, torch.Tensor]:
    CALLS["walks"] += 1
    return {"cost": costs.cost}


def _replaced(costs: Costs, parts: Any) -> Costs:
    CALLS["rebuilds"] += 1
    return Costs(parts["cost"])


register_batch_type(Costs, _parts, _replaced)


@dataclass(eq=False)
class CostBatch(BaseBatch):
    costs: Costs = field(default_factory=lambda: Costs(torch.zeros(0)))


class CostShuffler(BatchShuffler):
    def get_workloads(self, batch: Any) -> torch.Tensor:
        return _costs(batch).cost


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch: Any) -> tuple[torch.Tensor, None]:
        return self.weight * _costs(batch).cost, None


def _costs(batch: Any) -> Costs:
    return batch.costs if isinstance(batch, CostBatch) else batch["costs"]


def _batch(kind: str) -> Any:
    costs = Costs(torch.arange(4) * (1 + 9 * dist.get_rank()))
    if kind == "dict":
        return {"ids": torch.arange(4), "names": ["a", "b", "c", "d"], "costs": costs}
    features = KeyedJaggedTensor(["ids"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    return CostBatch(features, 4, {}, costs=costs)


@pytest.mark.parametrize("kind", ["dict", "BaseBatch"])
@on_ranks(2)
def test_a_step_walks_over_a_batch_once_and_makes_it_again_twice(kind):
    model = Model()
    pipeline = pipeline_of("none", model, torch.optim.SGD(model.parameters(), 0.1), CostShuffler())
    loader = iter([_batch(kind) for _ in range(STEPS)])
    for step in range(STEPS):
        if step == WARM_UP:
            before = CALLS.copy()
        pipeline.progress(loader)
    # A batch that is being planned when the counting starts is counted in part: two rebuilds at most.
    walks, rebuilds = (CALLS[name] - before[name] for name in ("walks", "rebuilds"))
    assert walks <= STEPS - WARM_UP and rebuilds <= 2 * (STEPS - WARM_UP)
    assert pipeline.plan.moves
