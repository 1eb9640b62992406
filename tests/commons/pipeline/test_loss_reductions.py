"""Loss reductions that a model does not have, loss tokens that cannot be, and means over none."""

import pytest
import torch
import torch.distributed as dist

from tests.commons.distributed.errors_and_warnings import error_of, warnings_of
from tests.commons.distributed.internals import MeanOfNoneError, loss_sum
from tests.commons.pipeline.ranking_pipelines import pipeline_of
from tests.commons.pipeline.scored_samples import Run, ScoredShuffler, Scorer, ddp, draw
from tests.commons.pipeline.weighted_means import (
    WeightedMean,
    WeightedShuffler,
    check_means_over_none,
    weighted_rows,
)
from tests.on_ranks import on_ranks


@pytest.mark.parametrize(
    ("declared", "returned", "rows", "value", "remedy"),
    [
        (None, "mean", (2, 2, 2), "loss_reduction=None", "expected"),
        ("mean", "sum", (2, 2, 2), "losses of shape (", '"sum"'),
        ("global_mean", "global_mean", (1, 0, 1), "a rank has no sample", 'use "mean"'),
    ],
)
@on_ranks(3)
def test_wrong_reductions_are_refused_on_all_ranks(declared, returned, rows, value, remedy):
    def step() -> None:
        model = ddp(Scorer("dict", returned))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        pipeline = pipeline_of("none", model, optimizer, ScoredShuffler("dict"), declared)
        pipeline.progress(iter(Run(rows=(rows,)).batches()))

    error = error_of(step)
    assert value in error and remedy in error


def test_the_mean_of_none_is_finite():
    assert float(loss_sum(torch.tensor(1.0), "mean", 0, 1.0)) == 0
    assert float(loss_sum(torch.tensor(torch.nan), "sum", 0, 1.0)) == 0
    for reduction, mean_tokens in (("mean", 1.0), ("global_mean", 0.0)):
        with pytest.raises(MeanOfNoneError, match=r'Clamp .*use "sum"'):
            loss_sum(torch.tensor(torch.nan), reduction, 0, mean_tokens)


@on_ranks(2)
def test_scale_raises_it_on_the_rank_without_loss_tokens():
    rank, shuffler = dist.get_rank(), WeightedShuffler()
    batch = weighted_rows(rank, 0)
    plan = shuffler.plan(batch)
    loss = WeightedMean()(shuffler.exchange(batch, plan))[0]
    if rank == 0:
        assert float(shuffler.scale(loss, plan, "mean")) == 2  # ranks reduce gradients to their mean
    else:
        assert "MeanOfNoneError" in error_of(shuffler.scale, loss, plan, "mean")


@on_ranks(2)
def test_a_mean_over_none_that_is_not_finite_is_an_error_on_all_ranks():
    check_means_over_none([])


@on_ranks(2)
def test_leaving_the_loop_logs_what_the_last_step_found():
    model = ddp(WeightedMean())
    shuffler = WeightedShuffler(enabled=False)
    pipeline = pipeline_of("none", model, torch.optim.SGD(model.parameters(), 0.0), shuffler, "mean")
    pipeline.progress(iter([weighted_rows(dist.get_rank(), 0)]))
    for number in range(2):
        with warnings_of("commons.pipeline") as logged:
            pipeline.reset()
        assert bool(logged) == (dist.get_rank() == 1 and number == 0)  # which has none


class WithoutLossTokens(ScoredShuffler):
    def get_loss_tokens(self, batch):
        return 0 * super().get_loss_tokens(batch)


@on_ranks(2)
def test_a_global_mean_may_count_others_than_loss_tokens():
    model, shuffler = ddp(Scorer("dict", "global_mean")), WithoutLossTokens("dict")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pipeline = pipeline_of("none", model, optimizer, shuffler, "global_mean")
    pipeline.progress(iter(Run(rows=((4, 4),)).batches()))
    assert any(bool(parameter.grad.any()) for parameter in model.parameters())
    assert float(pipeline.loss_sum) == 0
    plan, loss = WithoutLossTokens("dict").plan(draw("dict", [1, 2])), torch.tensor(3.0)
    assert float(shuffler.scale(loss, plan, "global_mean")) == pytest.approx(3.0)
    assert float(shuffler.scale(loss, plan, "global_mean", "sum")) == pytest.approx(1.5)
