"""A tower per domain under DistributedDataParallel, whose graph is static and changes as samples move."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commons.distributed import BatchShuffler
from tests.commons.distributed.errors_and_warnings import error_of
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


def _steps(**of_ddp: bool) -> None:
    """Trains ranks of one domain each. Samples move from the third step on, because their costs differ."""
    rank = dist.get_rank()
    group = dist.new_group()  # of its own, because a failed step leaves collectives in it
    model = DistributedDataParallel(Towers(), process_group=group, **of_ddp)
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


@on_ranks(2)
def test_a_static_graph_that_changes_is_explained_and_another_trains():
    error = error_of(_steps, static_graph=True)
    assert "static_graph" in error and "Samples that move may need other parameters" in error
    assert "static_graph=False, find_unused_parameters=True" in error


@on_ranks(2)
def test_a_graph_that_may_change_trains():
    _steps(find_unused_parameters=True)
