"""Code around a backward does the same with micro-batches as with whole batches, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commons.distributed import BatchShuffler
from commons.extensions.micro_batches import MicroBatches, run_micro_batches
from tests.on_ranks import on_ranks

Batch = dict[str, torch.Tensor]
Gradients = list[torch.Tensor]
Losses = Callable[[Any, int], torch.Tensor]  # of a model and the number of a batch


class Costs(BatchShuffler):
    def get_workloads(self, batch):
        return batch["cost"]

    def get_tokens(self, batch):
        return torch.ones_like(batch["cost"])


class Net(torch.nn.Module):
    """Its second layer is used by rows of odd numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, None]:
        scores = self.first(batch["x"])[:, 0]
        odd = batch["number"] % 2 == 1
        if odd.any():
            scores = scores.index_add(0, torch.where(odd)[0], self.second(batch["x"][odd])[:, 0])
        return scores.square(), None

    def penalty(self) -> torch.Tensor:
        return 0.1 * self.first.weight.square().sum()


def rows(number: int) -> Batch:
    drawn = torch.Generator().manual_seed(10 * number + dist.get_rank())
    cost = torch.tensor([[50, 40, 1, 2], [1, 2, 3, 4]][dist.get_rank()])
    return {"x": torch.randn(4, 3, generator=drawn), "number": torch.arange(4), "cost": cost}


def gradients(
    step: Callable[[Any, Losses], None],
    micro: bool,
    make: Callable[[], torch.nn.Module] = Net,
    **of_ddp: Any,
) -> Gradients:
    """Returns what a step leaves in the parameters; it is given the model and what computes losses."""
    shuffler = Costs(extensions=[MicroBatches(max_tokens=2)] if micro else [])
    model = DistributedDataParallel(make(), **of_ddp)

    def losses(model: Any, number: int) -> torch.Tensor:
        batch = rows(number)
        plan = shuffler.plan(batch)
        batch = shuffler.exchange(batch, plan)
        if micro:
            return run_micro_batches(model, batch, shuffler, plan, "sum")[0]
        return shuffler.scale(model(batch)[0], plan, "sum")

    step(model, losses)
    parameters = [*model.parameters()]
    return [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in parameters]


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


STEPS = [
    zeroed_late,
    with_a_penalty,
    scaled,
    of_two_batches,
    one_after_the_other,
    accumulated_unreduced,
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("of_ddp", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
@on_ranks(2)
def test_gradients_are_those_of_whole_batches(step, of_ddp):
    expected = gradients(step, False, **of_ddp)
    assert all(bool(gradient.any()) for gradient in expected)
    for got, of_whole in zip(gradients(step, True, **of_ddp), expected, strict=True):
        torch.testing.assert_close(got, of_whole, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_static_graph_is_learned_from_the_backward_of_the_loss():
    def three_steps(model: Any, losses: Losses) -> None:
        for number in range(3):
            model.zero_grad()
            losses(model, number).backward()

    expected = gradients(three_steps, False)
    for got, of_whole in zip(gradients(three_steps, True, static_graph=True), expected, strict=True):
        torch.testing.assert_close(got, of_whole, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_hooks_on_gradients_and_a_second_backward_are_refused():
    def clipped(model: Any, losses: Losses) -> None:
        model.module.first.weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        losses(model, 0).backward()

    def stepped(model: Any, losses: Losses) -> None:
        model.module.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        losses(model, 0).backward()

    for hooked in (clipped, stepped):
        with pytest.raises(ValueError, match=r"first\.weight has a hook on its gradient"):
            gradients(hooked, True)

    def twice(model: Any, losses: Losses) -> None:
        loss = losses(model, 0)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="was backpropagated twice"):
            loss.backward()

    gradients(twice, True)
