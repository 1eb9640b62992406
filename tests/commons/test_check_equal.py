"""The shipped check finds what makes balanced training differ, and passes models that are right."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from commons.check_equal import DifferentTrainingError, check_equal
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.padded import Padded
from tests.commons.extensions.pieces.drawn_cuts import DrawnCuts
from tests.commons.extensions.pieces.ranking_on_pieces import RankingOnPieces
from tests.commons.histories import TokenShuffler, histories
from tests.commons.pipeline.ranking_pipelines import RankingModel, pipeline_of, sharded
from tests.on_ranks import on_ranks


def batches(count: int = 6) -> list[Any]:
    drawn = [np.random.default_rng((dist.get_rank(), number)) for number in range(count)]
    return [histories(rng.lognormal(1.5, 1.0, 4).clip(1, 30), rng) for rng in drawn]


class Mean(RankingModel):
    def forward(self, batch):
        losses, output = super().forward(batch)
        return losses.mean(), output


class Summed(RankingModel):
    def forward(self, batch):
        losses, output = super().forward(batch)
        return losses.sum(), output


class Changed(RankingModel):
    """In its dense part, the attended values of a sample depend on the samples beside it."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        attend, self.dense.norm = self.dense.attend, change

        def changed(q, k, v, lengths, batch):
            attended = attend(q, k, v, lengths, batch)
            return change(attended) if isinstance(change, nn.Module) else change(attended, v, lengths)

        self.dense.attend = changed


class ForgottenTokens(TokenShuffler):
    def get_loss_tokens(self, batch):
        return torch.ones(batch.batch_size, dtype=torch.int64)


def pipeline(name: str, model: nn.Module, shuffler: Any, reduction: str = "sum") -> tuple[Any, Iterable[Any]]:
    return pipeline_of(name, *sharded(model), shuffler, reduction), batches()


RIGHT = {
    "none": lambda enabled: pipeline("none", RankingModel(), TokenShuffler(enabled=enabled)),
    "native": lambda enabled: pipeline("native", RankingModel(), TokenShuffler(enabled=enabled)),
    "mean": lambda enabled: pipeline("native", Mean(), TokenShuffler(enabled=enabled), "mean"),
    "micro-batches": lambda enabled: pipeline(
        "native", RankingModel(), TokenShuffler(enabled=enabled, extensions=[MicroBatches(40)])
    ),
    "padded": lambda enabled: pipeline(
        "native",
        RankingModel(),
        TokenShuffler(enabled=enabled, equal_rows=False, extensions=[Padded()]),
    ),
    "pieces": lambda enabled: pipeline(
        "native",
        RankingOnPieces(),
        TokenShuffler(enabled=enabled, equal_rows=False, extensions=[DrawnCuts(0)] if enabled else []),
    ),
}
WRONG = {
    "dropout": lambda: Changed(nn.Dropout(0.2)),
    "batch norm": lambda: Changed(nn.BatchNorm1d(16)),
    "the longest sequence": lambda: Changed(lambda attended, v, lengths: attended / max(lengths)),
    "in-batch negatives": lambda: Changed(lambda attended, v, lengths: attended - v.mean(0)),
    "forgotten loss tokens": Mean,
}


@pytest.mark.parametrize("name", RIGHT)
@on_ranks(2)
def test_right_models_pass(name):
    report = check_equal(RIGHT[name])
    assert report.losses.shape == (2, 5) and report.samples_moved
    if name != "pieces":  # which are placed by chance
        assert report.imbalance[1] < report.imbalance[0]
    assert "samples moved, imbalance" in str(report)
    for name_of, value in report.differences.items():
        assert value <= 5e-4 + report.rounding[name_of]


@pytest.mark.parametrize("name", WRONG)
@on_ranks(2)
def test_what_depends_on_the_batch_is_found(name):
    forgets = name == "forgotten loss tokens"
    kind, reduction = (ForgottenTokens, "mean") if forgets else (TokenShuffler, "sum")
    with pytest.raises(DifferentTrainingError, match="get_loss_tokens does not count") as error:
        check_equal(lambda enabled: pipeline("none", WRONG[name](), kind(enabled=enabled), reduction))
    assert "differs by" in str(error.value)
    assert "the mean loss of" in str(error.value) and "loss tokens goes from" in str(error.value)
    assert ("dense.norm (BatchNorm1d)" in str(error.value)) == (name == "batch norm")


@on_ranks(1)
def test_a_loop_of_ones_own_is_refused():
    with pytest.raises(TypeError, match='make the pipeline "none"'):
        check_equal(lambda enabled: (object(), []))


def unseeded(enabled: bool) -> Any:
    made = RIGHT["none"](enabled)
    with torch.no_grad():
        made[0]._model.module.dense.head.bias.add_(float(enabled))
    return made


def hardly(enabled: bool) -> Any:
    return pipeline_of("none", *sharded(RankingModel(), 1e-7), TokenShuffler(enabled=enabled)), batches()


COMPARES_NOTHING = {
    "no sample moved in any step": lambda _: pipeline("none", RankingModel(), TokenShuffler(enabled=False)),
    "gives no batches": lambda enabled: (RIGHT["none"](enabled)[0], []),
    "gives other batches each time": lambda enabled: (RIGHT["none"](enabled)[0], batches(6)[enabled:]),
    "another model each time: .*bias starts": unseeded,
    "changes so little that rounding hides": hardly,
}


@pytest.mark.parametrize("message", COMPARES_NOTHING)
@on_ranks(2)
def test_what_compares_nothing_is_named(message):
    with pytest.raises(ValueError, match=message):
        check_equal(COMPARES_NOTHING[message])


@pytest.mark.parametrize(
    ("breaks", "error", "message"),
    [
        ([True], DifferentTrainingError, r"bias differs by nan of what training changed"),
        ([False, True], ValueError, r"bias is not finite after training with balancing off"),
    ],
)
@on_ranks(2)
def test_what_is_not_finite_is_never_equal(breaks, error, message):
    def broken(enabled: bool) -> Any:
        made = RIGHT["none"](enabled)
        # Infinity that stays, as in a mask, is no difference.
        made[0]._model.register_buffer("mask", torch.full((2,), -torch.inf))
        if enabled in breaks:
            made[0]._model.module.dense.head.bias.register_hook(lambda gradient: gradient * torch.nan)
        return made

    with pytest.raises(error, match=message):
        check_equal(broken)
    assert check_equal(RIGHT["none"], steps=2).is_equal


REDUCTIONS = {
    "loss_reduction is 'sum', and the model returns a mean: .* Use \"mean\"": (Mean, "sum"),
    "loss_reduction is 'mean', and the model returns a sum: .* Use \"sum\"": (Summed, "mean"),
}


@pytest.mark.parametrize("message", REDUCTIONS)
@on_ranks(2)
def test_a_wrong_reduction_is_found(message):
    model, reduction = REDUCTIONS[message]
    with pytest.raises(ValueError, match=message):
        check_equal(lambda enabled: pipeline("none", model(), TokenShuffler(enabled=enabled), reduction))


@on_ranks(2)
def test_with_an_optimizer_that_divides_by_gradients_sgd_is_the_remedy():
    def of_adam(enabled: bool) -> Any:
        made, loader = pipeline("none", Changed(nn.Dropout(0.2)), TokenShuffler(enabled=enabled))
        made._optimizer = torch.optim.Adam(made._model.module.dense.parameters(), 0.1)
        return made, loader

    with pytest.raises(DifferentTrainingError, match="the optimizer divides by gradients: compare with SGD"):
        check_equal(of_adam)
