"""A tower per domain under DistributedDataParallel, whose graph changes as samples move."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commons.distributed import BatchShuffler
from tests.commons.pipeline.ranking_pipelines import pipeline_of
from tests.on_ranks import on_ranks


class Towers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        x, domain = batch["x"][:, None], batch["domain"]
        return sum(self.towers[of](x[domain == of]).sum() for of in domain.unique().tolist()), None


class CostShuffler(BatchShuffler):
    def get_workloads(self, batch: Any) -> torch.Tensor:
        return batch["cost"]


@on_ranks(2)
def test_a_graph_that_may_change_trains():
    """Trains ranks of one domain each. Samples move from the third step on, because their costs differ."""
    rank = dist.get_rank()
    model = DistributedDataParallel(Towers(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pipeline = pipeline_of("none", model, optimizer, CostShuffler(), "sum")
    loader = iter(
        {
            "x": torch.ones(4),
            "domain": torch.full((4,), rank),
            "cost": torch.ones(4, dtype=torch.int64) * (1 + 99 * rank * (step > 1)),
        }
        for step in range(5)
    )
    for _ in range(5):
        pipeline.progress(loader)
    assert pipeline.plan.moves
