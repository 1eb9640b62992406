"""However a model uses its parameters, micro-batches give them the gradients of the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.commons.extensions.micro_batches.test_one_backward import Batch, Gradients, Losses, gradients
from tests.on_ranks import on_ranks


class Model(nn.Module):
    """Its loss has no layer in common."""

    def __init__(self, scores: Callable[[Model, Batch], torch.Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self._scores = scores
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, None]:
        return self._scores(self, batch).square(), None


def alike() -> Model:
    """Two weights get one and the same gradient."""
    return Model(
        lambda model, batch: (batch["x"] @ (model.one.weight + model.other.weight).T)[:, 0],
        one=nn.Linear(3, 1, bias=False),
        other=nn.Linear(3, 1, bias=False),
    )


def expanded() -> Model:
    """A weight gets a gradient that is one number expanded."""
    return Model(
        lambda model, batch: model.layer(batch["x"])[:, 0] + model.more.weight.sum(),
        layer=nn.Linear(3, 1),
        more=nn.Linear(1, 3, bias=False),
    )


def reentrant() -> Model:
    return Model(
        lambda model, batch: checkpoint(model.layer, batch["x"].requires_grad_(), use_reentrant=True)[:, 0],
        layer=nn.Linear(3, 1),
    )


def tied() -> Model:
    layer = nn.Linear(3, 3)
    return Model(
        lambda model, batch: model.other(model.layer(batch["x"]).tanh()).sum(1), layer=layer, other=layer
    )


def recurrent() -> Model:
    """It keeps its weights in a list besides."""
    return Model(
        lambda model, batch: model.layer(batch["x"][:, :, None])[0].sum((1, 2)),
        layer=nn.LSTM(1, 2, batch_first=True),
    )


def sparse() -> Model:
    return Model(
        lambda model, batch: model.table(batch["number"])[:, 0] + model.layer(batch["x"])[:, 0],
        table=nn.Embedding(4, 1, sparse=True),
        layer=nn.Linear(3, 1),
    )


MODELS = [alike, expanded, reentrant, tied, recurrent, sparse]


@pytest.mark.parametrize("make", MODELS)
@on_ranks(2)
def test_gradients_are_those_of_the_whole_batch(make):
    def scaled(model: nn.Module, losses: Losses) -> None:
        for number in range(2):
            (3 * losses(model, number)).backward()

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return make()

    expected: Gradients = gradients(scaled, False, make=seeded)
    assert any(bool(gradient.to_dense().any()) for gradient in expected)
    for got, of_whole in zip(gradients(scaled, True, make=seeded), expected, strict=True):
        torch.testing.assert_close(got.to_dense(), of_whole.to_dense(), rtol=1e-5, atol=1e-6)
