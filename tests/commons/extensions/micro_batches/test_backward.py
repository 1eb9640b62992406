"""Micro-batches leave the gradients of whole batches, whatever the model and the code around a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from commons.extensions.micro_batches import MicroBatches, run_micro_batches
from tests.commons.pipeline.runs import Costs
from tests.on_ranks import on_ranks

Batch = dict[str, torch.Tensor]
Losses = Callable[[Any, int], torch.Tensor]  # of a model and the number of a batch


class Model(nn.Module):
    """Its loss has no layer in common, and its modules may have any names."""

    def __init__(self, scores: Callable[[Model, Batch], torch.Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self._scores = scores
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, None]:
        return self._scores(self, batch).square(), None

    def penalty(self) -> torch.Tensor:
        return 0.1 * self.first.weight.square().sum()


def at_times_unused() -> Model:
    """Its second layer is used by rows of odd numbers alone."""

    def scores(model: Model, batch: Batch) -> torch.Tensor:
        scores, odd = model.first(batch["x"])[:, 0], batch["number"] % 2 == 1
        if not odd.any():
            return scores
        return scores.index_add(0, torch.where(odd)[0], model.second(batch["x"][odd])[:, 0])

    return Model(scores, first=nn.Linear(3, 1), second=nn.Linear(3, 1))


def alike() -> Model:
    """Two weights get one and the same gradient."""
    return Model(
        lambda model, batch: (batch["x"] @ (model.first.weight + model.other.weight).T)[:, 0],
        first=nn.Linear(3, 1, bias=False),
        other=nn.Linear(3, 1, bias=False),
    )


def expanded() -> Model:
    """A weight gets a gradient that is one number expanded."""
    return Model(
        lambda model, batch: model.first(batch["x"])[:, 0] + model.more.weight.sum(),
        first=nn.Linear(3, 1),
        more=nn.Linear(1, 3, bias=False),
    )


def reentrant() -> Model:
    return Model(
        lambda model, batch: checkpoint(model.first, batch["x"].requires_grad_(), use_reentrant=True)[:, 0],
        first=nn.Linear(3, 1),
    )


def tied() -> Model:
    layer = nn.Linear(3, 3)
    return Model(
        lambda model, batch: model.other(model.first(batch["x"]).tanh()).sum(1), first=layer, other=layer
    )


def recurrent() -> Model:
    """It keeps its weights in a list besides."""
    return Model(
        lambda model, batch: model.first(batch["x"][:, :, None])[0].sum((1, 2)),
        first=nn.LSTM(1, 2, batch_first=True),
    )


def listed() -> Model:
    """Uses its weight as an attribute, and from a list besides."""
    layer = nn.Linear(3, 1)
    kept = [layer.weight]
    return Model(lambda model, batch: (model.first(batch["x"]) + batch["x"] @ kept[0].T)[:, 0], first=layer)


def sparse() -> Model:
    return Model(
        lambda model, batch: model.table(batch["number"])[:, 0] + model.first(batch["x"])[:, 0],
        table=nn.Embedding(4, 1, sparse=True),
        first=nn.Linear(3, 1),
    )


def rows(number: int) -> Batch:
    drawn = torch.Generator().manual_seed(10 * number + dist.get_rank())
    cost = torch.tensor([[50, 40, 1, 2], [1, 2, 3, 4]][dist.get_rank()])
    return {"x": torch.randn(4, 3, generator=drawn), "number": torch.arange(4), "cost": cost}


def gradients(
    step: Callable[[Any, Losses], None],
    micro: bool,
    make: Callable[[], nn.Module] = at_times_unused,
    **of_ddp: Any,
) -> list[torch.Tensor]:
    """Returns what a step leaves in the parameters; it is given the model and what computes losses."""
    torch.manual_seed(0)
    shuffler = Costs(extensions=[MicroBatches(max_tokens=45)] if micro else [])
    model = DistributedDataParallel(make(), **of_ddp)

    def losses(model: Any, number: int) -> torch.Tensor:
        batch = rows(number)
        plan = shuffler.plan(batch)
        batch = shuffler.exchange(batch, plan)
        if micro:
            assert plan.num_parts == 2
            return run_micro_batches(model, batch, shuffler, plan, "sum")[0]
        return shuffler.scale(model(batch)[0], plan, "sum")

    step(model, losses)
    of_all = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    return [gradient.to_dense().clone() for gradient in of_all]


def accumulated(model: Any, losses: Losses) -> None:
    for number in range(2):
        (3 * losses(model, number)).backward()


def zeroed_late(model: Any, losses: Losses) -> None:
    losses(model, 0).backward()  # an earlier step
    loss = losses(model, 1)
    model.zero_grad()
    loss.backward()


def with_a_penalty(model: Any, losses: Losses) -> None:
    (losses(model, 0) / 2 + model.module.penalty()).backward()


def scaled(model: Any, losses: Losses) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for number in range(3):
        scaler.scale(losses(model, number) + model.module.penalty()).backward()
    scaler.unscale_(optimizer)


def of_two_batches(model: Any, losses: Losses) -> None:
    ((losses(model, 0) + 3 * losses(model, 1)) / 2).backward()


def one_after_the_other(model: Any, losses: Losses) -> None:
    """DistributedDataParallel reduces the first of two backwards alone."""
    both = losses(model, 0), losses(model, 1)
    for loss in both:
        (loss * 0.5).backward()


def accumulated_unreduced(model: Any, losses: Losses) -> None:
    with model.no_sync():
        for number in range(2):
            (4 * losses(model, number)).backward()
    (0.5 * losses(model, 2)).backward()


def three_steps(model: Any, losses: Losses) -> None:
    for number in range(3):
        model.zero_grad()
        losses(model, number).backward()


STEPS = [zeroed_late, with_a_penalty, scaled, of_two_batches, one_after_the_other, accumulated_unreduced]
MODELS = [at_times_unused, alike, expanded, reentrant, tied, recurrent, listed, sparse]
OF_DDP: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
CASES = {
    **{step.__name__: (step, at_times_unused, {}) for step in STEPS},
    **{
        f"{step.__name__}, {name}": (step, at_times_unused, OF_DDP[name])
        for step in STEPS
        for name in ("views", "unused")
    },
    **{make.__name__: (accumulated, make, {}) for make in MODELS},
    "a static graph": (three_steps, at_times_unused, OF_DDP["static"]),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_gradients_are_those_of_whole_batches(case):
    step, make, of_ddp = CASES[case]
    # Without micro-batches, a graph that changes is no static one.
    expected = gradients(step, False, make, **({} if "static_graph" in of_ddp else of_ddp))
    assert all(bool(gradient.any()) for gradient in expected)
    for got, of_whole in zip(gradients(step, True, make, **of_ddp), expected, strict=True):
        torch.testing.assert_close(got, of_whole, rtol=1e-5, atol=1e-6)


def clipped(model: Any, losses: Losses) -> None:
    model.module.first.weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    losses(model, 0).backward()


def twice(model: Any, losses: Losses) -> None:
    loss = losses(model, 0)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (clipped, ValueError, r"first\.weight has a hook on its gradient"),
        (twice, RuntimeError, "was backpropagated twice"),
    ],
)
@on_ranks(2)
def test_hooks_on_gradients_and_a_second_backward_are_refused(step, error, message):
    with pytest.raises(error, match=message):
        gradients(step, True)
