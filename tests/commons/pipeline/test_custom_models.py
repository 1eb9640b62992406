"""Custom batches, models and extensions in pipelines."""

from __future__ import annotations

import pytest
import torch

from commons.distributed import Extension
from tests.commons.pipeline.click_models import OfDict, check_trained, trained
from tests.commons.pipeline.ranking_pipelines import pipeline_of
from tests.commons.pipeline.runs import Costs, Mean


@pytest.mark.parametrize(
    ("kind", "pipeline_name", "arguments"),
    [
        ("torchrec", "native", {}),
        ("dict", "native", {"pipeline_postproc": True}),
        ("pair", "native", {"enqueue_batch_after_forward": True}),
        ("deep", "native", {"dmp_collection_sync_interval_batches": None, "apply_jit": False}),
        ("deep", "none", {}),
        ("padded", "native", {}),
    ],
)
def test_any_batch_trains_in_a_pipeline_as_in_one_process(pools, kind, pipeline_name, arguments):
    check_trained(pools(2).run(trained, kind, pipeline_name, arguments, {}))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("custom_model_fwd", "the stage calls the model"),
        ("enable_inplace_copy_batch", "its copies bypass the exchange"),
    ],
)
def test_arguments_that_bypass_the_stage_are_refused(name, reason):
    with pytest.raises(ValueError, match=f"SparseDistTrainPipeline takes no {name}: {reason}"):
        pipeline_of("native", OfDict(), None, None, **{name: True})


class Noting(Extension):
    """Notes when a pipeline calls its hooks, and reports a figure."""

    def __init__(self, name: str, order: int, notes: list[str]) -> None:
        self.name, self.order, self.notes = name, order, notes

    def join(self, model, device, loss_reduction):
        self.notes.append(f"{self.name}: join {type(model).__name__} {device} {loss_reduction}")

    def forward(self, step, forward):
        self.notes.append(f"{self.name}: forward")
        returned = forward(step)
        self.notes.append(f"{self.name}: computed {len(step.batch['cost'])} of {step.plan.num_rows.sum()}")
        return returned

    def check_ran(self, plan):
        self.notes.append(f"{self.name}: check ran")

    def report(self, plan):
        return {f"seen_by_{self.name}": len(plan.rows.home)}


def _noted() -> tuple[list[str], dict[str, int]]:
    """Returns what two extensions noted of a step of a pipeline, and what its report has of them."""
    notes: list[str] = []
    shuffler = Costs(extensions=[Noting("inner", 2, notes), Noting("outer", 1, notes)])
    model = Mean()
    pipeline = pipeline_of("none", model, torch.optim.SGD(model.parameters(), lr=0.0), shuffler, "sum")
    pipeline.progress(iter([{"cost": torch.tensor([1, 2]), "x": torch.ones(2, 3)}]))
    figures = dict(pipeline.report.extensions)
    pipeline.reset()
    return notes, figures


def test_a_pipeline_calls_the_hooks_of_extensions_in_their_order(pools):
    computed = ["inner: computed 2 of 4", "outer: computed 2 of 4"]
    joined = ["outer: join Mean cpu sum", "inner: join Mean cpu sum"]
    expected = [
        *joined,
        "outer: forward",
        "inner: forward",
        *computed,
        "outer: check ran",
        "inner: check ran",
    ]
    assert pools(2).run(_noted) == [(expected, {"seen_by_outer": 4, "seen_by_inner": 4})] * 2
