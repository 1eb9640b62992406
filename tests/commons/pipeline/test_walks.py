"""How often a step walks over a batch, and makes its containers again."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from commons.distributed import BatchShuffler
from commons.sequence_batch import register_batch_type
from tests.commons.pipeline.ranking_pipelines import pipeline_of
from tests.commons.pipeline.runs import Squares
from tests.on_ranks import on_ranks

CALLS: Counter[str] = Counter()
STEPS, WARM_UP = 24, 18  # the first 16 batches are watched for changes


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


class CostShuffler(BatchShuffler):
    def get_workloads(self, batch: Any) -> torch.Tensor:
        return batch["costs"].cost


@on_ranks(2)
def test_a_step_walks_over_a_batch_once_and_makes_it_again_twice():
    costs = torch.arange(4) * (1 + 9 * dist.get_rank())
    batches = [{"number": torch.ones(4), "names": [*"abcd"], "costs": Costs(costs)} for _ in range(STEPS)]
    model, loader = Squares(), iter(batches)
    pipeline = pipeline_of("none", model, torch.optim.SGD(model.parameters(), 0.1), CostShuffler())
    for step in range(STEPS):
        if step == WARM_UP:
            before = CALLS.copy()
        pipeline.progress(loader)
    # A batch that is being planned when the counting starts is counted in part: two rebuilds at most.
    walks, rebuilds = (CALLS[name] - before[name] for name in ("walks", "rebuilds"))
    assert walks <= STEPS - WARM_UP and rebuilds <= 2 * (STEPS - WARM_UP)
    assert pipeline.plan.moves
