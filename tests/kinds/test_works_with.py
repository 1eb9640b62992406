"""Entries of docs/works-with.md that no other test shows: each trains as one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from commons.extensions.micro_batches import MicroBatches
from tests.commons.pipeline.click_models import (
    DIM,
    STEPS,
    FirstFieldShuffler,
    OfDict,
    kjt_and_labels,
    sharding,
    shards_of,
)
from tests.commons.pipeline.ranking_pipelines import CPU, pipeline_of, steps_of
from tests.e2e.torchrun import torchrun
from tests.on_ranks import on_ranks

RATE = 0.5


class Deep(OfDict):
    """Pooled tables, and a dense part of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head.linear = nn.Sequential(nn.Linear(2 * DIM, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.head.parameters(), RATE)


def keyed(model: nn.Module) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(
        dict(model.head.named_parameters()), lambda parameters: torch.optim.SGD(parameters, RATE)
    )


@dataclass(frozen=True)
class Partner:
    """A change of the model before it is sharded, its optimizer, and whether that makes a scheduler."""

    prepare: Callable[[nn.Module], Any] = lambda model: None
    optimizer: Callable[[nn.Module], Any] = sgd
    scheduler: Callable[[Any], Any] | None = None
    tolerance: float = 1e-5
    changes_training: bool = True


def clipped_by_norm(model: nn.Module) -> Any:
    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(list(model.head.parameters()), 0.02)

    optimizer = sgd(model)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def in_bfloat16(model: nn.Module) -> None:
    linear = model.head.linear
    linear.forward = torch.autocast("cpu", torch.bfloat16)(linear.forward)


def warmed_up(model: nn.Module) -> Any:
    return WarmupOptimizer(keyed(model), [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)])


PARTNERS = {
    "torch.compile": Partner(lambda model: model.head.linear.compile(dynamic=True), changes_training=False),
    "bfloat16 autocast": Partner(in_bfloat16, tolerance=2e-2),
    "clip_grad_norm_": Partner(optimizer=clipped_by_norm),
    "TorchRec's clipping": Partner(
        optimizer=lambda model: GradientClippingOptimizer(keyed(model), GradientClipping.VALUE, 0.01)
    ),
    "a learning rate scheduler": Partner(
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.3)
    ),
    "TorchRec's warm-up": Partner(optimizer=warmed_up),
    "fully_shard": Partner(changes_training=False),
}


def trained(
    partner: Partner, fully_sharded: bool, cap: int | None
) -> tuple[list[float], dict[tuple[str, int], torch.Tensor]]:
    """Trains in a pipeline, in several micro-batches under a cap of tokens.

    Returns losses, and this rank's parameters by name and first row.
    """
    model, rank = Deep(), dist.get_rank()
    partner.prepare(model)
    if fully_sharded:
        fully_shard(model.head.linear, mesh=init_device_mesh("cpu", (2,)))
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": RATE})
    plan = sharding(model.tables, row_wise_tables=False)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, init_data_parallel=not fully_sharded)
    optimizer = partner.optimizer(model)
    scheduler = partner.scheduler(optimizer) if partner.scheduler else None
    shuffler = FirstFieldShuffler(extensions=[] if cap is None else [MicroBatches(cap)])
    pipeline = pipeline_of("native", sharded, optimizer, shuffler, "mean")
    loaded = [kjt_and_labels(sum(rows[:rank]), rows[rank], step) for step, rows in enumerate(STEPS)]
    batches, losses = [{"features": kjt, "labels": labels} for kjt, labels in loaded], []
    for loss_sum, tokens, output in steps_of(pipeline, batches):
        assert cap is None or len(output) > 1
        dist.all_reduce(loss_sum)
        losses.append(float(loss_sum) / tokens)
        if scheduler:
            scheduler.step()
    if fully_sharded:
        parameters = {name: value.full_tensor() for name, value in model.head.linear.named_parameters()}
        return losses, {(f"head.linear.{name}", 0): value.detach() for name, value in parameters.items()}
    return losses, shards_of(sharded)


def trained_alone(partner: Partner) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the losses and parameters of one process with the whole batches."""
    model, losses = Deep(), []
    partner.prepare(model)
    tables, optimizer = torch.optim.SGD(model.tables.parameters(), RATE), partner.optimizer(model)
    scheduler = partner.scheduler(optimizer) if partner.scheduler else None
    for step, rows in enumerate(STEPS):
        kjt, labels = kjt_and_labels(0, sum(rows), step)
        loss, _ = model({"features": kjt, "labels": labels})
        model.zero_grad()
        loss.backward()
        tables.step(), optimizer.step()
        losses.append(float(loss.detach()))
        if scheduler:
            scheduler.step()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("cap", [None, 12])
@pytest.mark.parametrize("name", PARTNERS)
@on_ranks(2)
def test_a_partner_trains_as_in_one_process(name, cap):
    partner = PARTNERS[name]
    losses, parameters = trained(partner, name == "fully_shard", cap)
    expected_losses, expected = trained_alone(partner)
    assert losses == pytest.approx(expected_losses, rel=partner.tolerance)
    for (key, row), got in parameters.items():
        whole = expected[key][row : row + len(got)]
        torch.testing.assert_close(got, whole, rtol=partner.tolerance, atol=partner.tolerance / 10)
    plain = trained_alone(Partner())[0]
    assert partner.changes_training == (expected_losses != pytest.approx(plain, rel=1e-5))


@pytest.mark.parametrize(
    ("name", "package"),
    [("accelerate", "accelerate"), ("lightning", "lightning"), ("stateful_loader", "torchdata")],
)
def test_loops_of_other_libraries(tmp_path, name, package):
    pytest.importorskip(package, reason=f"needs {package}, which nothing else here does")
    torchrun(tmp_path, Path(__file__).with_name("foreign_loops.py"), name, fresh=True)
