"""Reports of steps, the time that a rank computes, the order of collectives, and hooks of extensions."""

import itertools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commons.distributed import BalanceReport, Extension
from tests.commons.pipeline.launches import check_launches, launches
from tests.commons.pipeline.ranking_pipelines import PIPELINES, pipeline_of
from tests.commons.pipeline.runs import Costs, Squares, check_spans, spans
from tests.on_ranks import on_ranks


def pipeline_after(batch: dict[str, torch.Tensor], *extensions: Extension) -> Any:
    """Returns a pipeline that has run a step of a batch."""
    model = Squares()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pipeline = pipeline_of("none", model, optimizer, Costs(extensions=list(extensions)))
    pipeline.progress(iter([batch]))
    return pipeline


@on_ranks(2)
def test_a_report_is_one_line():
    cost = torch.tensor([[6, 4, 2], [1, 2, 1]])[dist.get_rank()]
    pipeline = pipeline_after({"cost": cost, "number": torch.ones(3, 500, dtype=torch.float64)})
    report = pipeline.report
    pipeline.reset()
    assert report.bytes_moved == report.samples_moved * (8 + 4000)
    balance = "imbalance 1.50 -> 1.00 in workload units (bound 1.00), tokens 1.50 -> 1.00"
    expected = f"{balance}, 2 of 6 samples moved (8 kB)"
    times = r", waited \d+\.\d ms for the plan, exchange \d+\.\d ms"
    assert re.fullmatch(re.escape(expected) + times, str(report))
    assert str(BalanceReport.of(pipeline.plan, True)) == expected


@pytest.mark.parametrize(("pipeline_name", "sharded_tables"), [("native", True), ("none", False)])
def test_a_slow_rank_computes_and_the_others_wait(pools, pipeline_name, sharded_tables):
    check_spans(pools(2).run(spans, pipeline_name, sharded_tables, {}), 1)


@pytest.mark.parametrize(
    ("name", "settings"),
    [*itertools.product(PIPELINES, [{}]), *itertools.product(["none", "native"], [{"equal_rows": False}])],
)
def test_all_ranks_launch_the_same_collectives_in_the_same_order(pools, name, settings):
    check_launches(pools(3).run(launches, name, settings), 2)  # the job's, and the exchange's


class Noting(Extension):
    """Notes when a pipeline calls its hooks, and reports a figure."""

    def __init__(self, name: str, order: int, notes: list[str]) -> None:
        self.name, self.order, self.notes = name, order, notes

    def join(self, model, device, loss_reduction):
        self.notes.append(f"{self.name} joins {type(model).__name__} {device} {loss_reduction}")

    def forward(self, step, forward):
        self.notes.append(f"{self.name} gets {len(step.batch['cost'])} of {step.plan.num_rows.sum()}")
        returned = forward(step)
        self.notes.append(f"{self.name} returns")
        return returned

    def check_ran(self, plan):
        self.notes.append(f"{self.name} checks")

    def report(self, plan):
        return {f"seen_by_{self.name}": len(plan.rows.home)}


@on_ranks(2)
def test_a_pipeline_calls_the_hooks_of_extensions_in_their_order():
    notes: list[str] = []
    batch = {"cost": torch.tensor([1, 2]), "number": torch.ones(2)}
    pipeline = pipeline_after(batch, Noting("inner", 2, notes), Noting("outer", 1, notes))
    report = pipeline.report
    pipeline.reset()
    assert notes == [
        *("outer joins Squares cpu sum", "inner joins Squares cpu sum"),
        *("outer gets 2 of 4", "inner gets 2 of 4", "inner returns", "outer returns"),
        *("outer checks", "inner checks"),
    ]
    assert report.extensions == {"seen_by_outer": 4, "seen_by_inner": 4}
    assert ", 4 seen by outer, 4 seen by inner, waited" in str(report)
