"""The line that a report prints."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commons.distributed import BalanceReport
from tests.commons.distributed.shufflers import FieldShuffler
from tests.commons.pipeline.ranking_pipelines import pipeline_of


class Costs(FieldShuffler):
    def get_workloads(self, batch):
        return batch["cost"]

    get_tokens = get_workloads


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return self.weight * batch["x"].sum(1), None


def _printed(settings: dict[str, Any]) -> tuple[str, str, str]:
    """Returns the line of a step, what repr shows, and the line of a plan alone."""
    cost = torch.tensor([[6, 4, 2], [1, 2, 1]])[dist.get_rank()]
    batch = {"cost": cost, "x": torch.ones(3, 500, dtype=torch.float64)}
    model, shuffler = Mean(), Costs(**settings)
    pipeline = pipeline_of("none", model, torch.optim.SGD(model.parameters(), lr=0.0), shuffler)
    pipeline.progress(iter([batch]))
    report = pipeline.report
    pipeline.reset()
    assert report.bytes_moved == report.samples_moved * (8 + 4000)
    return str(report), repr(report), str(BalanceReport.of(pipeline.plan, True))


TIMES = r", waited \d+\.\d ms for the plan, exchange \d+\.\d ms"


@pytest.mark.parametrize(
    ("settings", "more"), [({}, ""), ({"max_tokens_per_micro_batch": 6}, ", 2 micro-batches")]
)
def test_a_report_is_one_line(pools, settings, more):
    for line, shown, of_plan in pools(2).run(_printed, settings):
        balance = "imbalance 1.50 → 1.00 in workload units (bound 1.00), tokens 1.50 → 1.00"
        expected = f"{balance}, 2 of 6 samples moved (8 kB){more}"
        assert re.fullmatch(re.escape(expected) + TIMES, line)
        assert shown == f"<BalanceReport: {line}>"
        assert of_plan == expected
