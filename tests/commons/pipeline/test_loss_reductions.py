"""Any container and loss reduction learns what one process with the whole batch learns."""

from __future__ import annotations

from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commons.distributed.loss_reduction import MeanOfNoneError, loss_sum
from commons.pipeline import shuffle_stage
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.shufflers import FieldShuffler
from tests.commons.pipeline.ranking_pipelines import steps_of
from tests.commons.pipeline.scored_samples import (
    MAKE,
    UNEVEN,
    WITHOUT_SAMPLES,
    check_scored,
    draw,
    identity_pipeline,
    on_whole_batch,
    ran,
    replicated_pipeline,
    samples_of,
    scored_pipeline,
    scored_steps,
)
from tests.on_ranks import on_ranks


@pytest.mark.parametrize("kind", sorted(MAKE))
def test_any_container_learns_what_one_process_does(pools, kind):
    cases = [
        (kind, reduction, rows, {"equal_rows": (rows == UNEVEN[0]) == first})
        for reduction, rows, first in product(("sum", "mean", "global_mean"), UNEVEN, (True, False))
        if first or kind in ("dict", "base")
    ]
    check_scored(pools(2).run(scored_steps, cases), cases)


def _logged(reduction, rows):
    """Returns the loss of each of two steps, as the docstring of `progress` tells to log it."""
    pipeline, losses = scored_pipeline("dict", reduction), []
    batches = [draw("dict", samples_of(dist.get_rank(), rows, step)) for step in range(2)]
    for of_rank, global_loss_tokens, _ in steps_of(pipeline, batches):
        dist.all_reduce(of_rank)
        losses.append(float(of_rank) / global_loss_tokens)
    return losses


@pytest.mark.parametrize("reduction", ["sum", "mean", "global_mean"])
def test_the_loss_that_one_logs_is_that_of_one_process(pools, reduction):
    rows = (6, 3)
    expected = [on_whole_batch(range(first, first + sum(rows)))[0] for first in (0, 1000)]
    for losses in pools(2).run(_logged, reduction, rows):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_rank_without_samples_adds_nothing(pools):
    cases = [
        case
        for kind, reduction in product(["dict", "dataclass", "tensordict", "base"], ["sum", "mean"])
        for case in (
            (kind, reduction, WITHOUT_SAMPLES, {}),
            (kind, reduction, (0, 5, 0), {"equal_rows": False}),
        )
    ]
    check_scored(pools(3).run(scored_steps, cases), cases)


def test_without_balancing_the_mean_is_still_that_of_all_ranks(pools):
    cases = [("dict", "mean", rows, None) for rows in [(6, 5), (4, 0)]]
    check_scored(pools(2).run(scored_steps, cases), cases)


class Logarithm(nn.Module):
    """Infinite on a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch):
        losses = (self.weight * batch["x"]).log()
        return losses.mean(), losses


class EqualCosts(FieldShuffler):
    def get_workloads(self, batch):
        return torch.ones(len(batch["x"]), dtype=torch.int64)


@on_ranks(4)
def test_more_ranks_than_samples():
    pipeline = replicated_pipeline(Logarithm(), "mean", EqualCosts())
    loss, _, gradients, _ = ran(
        pipeline, [{"x": torch.tensor([2.0, 3.0, 4.0])}] if dist.get_rank() == 3 else []
    )
    assert loss == pytest.approx(float(torch.tensor([2.0, 3.0, 4.0]).log().mean()), rel=1e-5)
    assert float(gradients[0]) == pytest.approx(1.0, rel=1e-5)


def _train(reduction, model_reduction, rows, **settings):
    pipeline = scored_pipeline("dict", reduction, **settings)
    pipeline._model.module._reduction = model_reduction
    mine = samples_of(dist.get_rank(), rows)
    pipeline.progress(iter([draw("dict", mine)] if mine else []))


@on_ranks(3)
def test_wrong_reductions_are_refused():
    expected = [
        "ValueError: loss_reduction=None: expected",
        "ValueError: loss_reduction='average': expected",
        "ValueError: the model returned losses of shape (",
    ]
    errors = [
        error_of(_train, None, "mean", (2, 2, 2)),
        error_of(_train, "average", "mean", (2, 2, 2)),
        error_of(_train, "mean", "sum", (2, 2, 2)),
    ]
    assert all(map(str.startswith, errors, expected)), errors


@on_ranks(3)
def test_a_global_mean_with_a_rank_without_samples_is_refused_on_all_ranks():
    balanced = error_of(_train, "global_mean", "global_mean", (1, 0, 1))
    batches = [draw("dict", [1, 2])] if dist.get_rank() != 1 else []
    balanced, identity = [balanced, error_of(ran, identity_pipeline("global_mean"), batches)]
    assert "runs a copy of one" in balanced
    assert "a rank has no sample in this step" in identity


class WithoutLossTokens(EqualCosts):
    def get_loss_tokens(self, batch):
        return torch.full((len(batch["x"]),), dist.get_rank())


class OverNone(Logarithm):
    def forward(self, batch):
        losses = super().forward(batch)[1]
        return losses.sum() / losses.new_zeros(()), losses


@on_ranks(2)
def test_leaving_the_loop_logs_what_the_last_step_found():
    pipeline = replicated_pipeline(OverNone(), "mean", WithoutLossTokens(enabled=False))
    pipeline.progress(iter([{"x": torch.ones(2)}]))
    for number in range(2):
        with mock.patch.object(shuffle_stage.logger, "error") as logged:
            pipeline.reset()
        assert logged.called == (dist.get_rank() == 0 and number == 0)


def test_a_mean_is_one_number():
    with pytest.raises(ValueError, match=r"losses of shape \(1,\), but 'mean' is one number"):
        loss_sum(torch.ones(1), "mean", 1, 1.0)


def test_a_mean_of_no_loss_tokens_counts_for_nothing_if_it_is_finite():
    assert float(loss_sum(torch.tensor(1.0), "mean", 0, 1.0)) == 0
    assert float(loss_sum(torch.tensor(torch.nan), "sum", 0, 1.0)) == 0
    for reduction, mean_tokens in (("mean", 1.0), ("global_mean", 0.0)):
        with pytest.raises(MeanOfNoneError, match=r'Clamp what the mean divides by, as in .*use "sum"'):
            loss_sum(torch.tensor(torch.nan), reduction, 0, mean_tokens)


class WithoutAny(EqualCosts):
    def get_loss_tokens(self, batch):
        return torch.zeros(len(batch["x"]), dtype=torch.int64)


@on_ranks(2)
def test_a_global_mean_may_count_others_than_loss_tokens():
    pipeline = replicated_pipeline(Logarithm(), "global_mean", WithoutAny())
    batch = {"x": torch.tensor([2.0, 3.0])}
    pipeline.progress(iter([batch]))
    gradient = [parameter.grad.clone() for parameter in pipeline._model.parameters()]
    assert float(gradient[0]) == pytest.approx(1.0) and float(pipeline.loss_sum) == 0
    shuffler = WithoutAny()
    loss = torch.tensor(3.0)
    assert float(shuffler.scale(loss, shuffler.plan(batch), "global_mean")) == pytest.approx(3.0)
    assert float(shuffler.scale(loss, shuffler.plan(batch), "global_mean", "sum")) == pytest.approx(1.5)
