"""Entries of docs/works-with.md that no other test shows: each trains as one process does."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from commons.extensions.micro_batches import MicroBatches
from tests.commons.extensions.together.test_equal_to_one_process import SMALL, scores_of
from tests.commons.pipeline.scored_samples import (
    ALONE,
    RATE,
    Partner,
    Run,
    Scorer,
    check_trained,
    sgd,
    trained,
    trained_alone,
)

ROWS = ((6, 5), (4, 4), (3, 2))


def keyed(model: Scorer) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(
        dict(model.head.named_parameters()), lambda parameters: torch.optim.SGD(parameters, RATE)
    )


def clipped_by_norm(model: Scorer) -> Any:
    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(list(model.head.parameters()), 0.02)

    optimizer = sgd(model)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def in_bfloat16(model: Scorer) -> None:
    first = model.head.linear[0]
    in_bfloat16 = torch.autocast("cpu", torch.bfloat16)(first.forward)
    first.forward = lambda pooled: in_bfloat16(pooled).float()


def warmed_up(model: Scorer) -> Any:
    return WarmupOptimizer(keyed(model), [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)])


PARTNERS = {
    "torch.compile": Partner(lambda model: model.head.linear.compile(dynamic=True)),
    "bfloat16 autocast": Partner(in_bfloat16, tolerance=2e-2),
    # A norm of 0.02 leaves small changes, in which rounding weighs more.
    "clip_grad_norm_": Partner(optimizer=clipped_by_norm, tolerance=5e-5),
    "TorchRec's clipping": Partner(
        optimizer=lambda model: GradientClippingOptimizer(keyed(model), GradientClipping.VALUE, 0.01)
    ),
    "a learning rate scheduler": Partner(
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.3)
    ),
    "TorchRec's warm-up": Partner(optimizer=warmed_up),
    "fully_shard": Partner(
        shard=lambda model: fully_shard(model.head.linear, mesh=init_device_mesh("cpu", (2,)))
    ),
}
SAME_TRAINING = ("torch.compile", "fully_shard")


def trained_with(name: str, run: Run) -> Any:
    return trained(run, scores_of, PARTNERS[name])


@pytest.mark.parametrize("cap", [None, SMALL])
@pytest.mark.parametrize("name", PARTNERS)
def test_a_partner_trains_as_in_one_process(pools, name, cap):
    extensions = [] if cap is None else [MicroBatches(cap)]
    run = Run(rows=ROWS, name="native", sharded="table", settings={"extensions": extensions})
    results = pools(2).run(trained_with, name, run)
    check_trained(results, run, PARTNERS[name])
    assert (min(results[0].parts) > 1) == (cap is not None)
    plain, expected = (trained_alone(run, partner).losses for partner in (ALONE, PARTNERS[name]))
    assert (name in SAME_TRAINING) == (expected == pytest.approx(plain, rel=1e-5))
