"""Pieces and micro-batches in TorchRec's other pipelines."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShufflerFactory
from commons.extensions.micro_batches import MicroBatches
from commons.training import OptimizerArgs, shard_model
from tests.commons.extensions.pieces.drawn_cuts import DrawnCuts
from tests.commons.pipeline.click_models import shards_of
from tests.commons.pipeline.ranking_pipelines import CPU, OTHERS, pipeline_of, steps_of
from tests.gradient_models import CASES as MODELS
from tests.on_ranks import on_ranks

STEPS = 4


def _trained(name: str, *extensions: Any) -> tuple[list[float], Any, int]:
    """Trains a model of HSTU; returns the losses of all ranks, its parameters, and the parts of a step."""
    case, rank = MODELS["ranking"], dist.get_rank()
    model, optimizer = shard_model(case.make_model(), OptimizerArgs("sgd", 0.1), CPU)
    settings = {**case.shuffler, "equal_rows": False, "extensions": list(extensions)}
    pipeline = pipeline_of(name, model, optimizer, BatchShufflerFactory.create_from_config(settings))
    batches = [case.make_batch(case.samples(rank + 10 * number, 4)) for number in range(STEPS)]
    losses, parts = [], 0
    for loss_sum, _, output in steps_of(pipeline, batches):
        dist.all_reduce(loss_sum)
        losses.append(float(loss_sum))
        parts = max(parts, len(output) if isinstance(output, list) else len(pipeline.plan.destination))
    return losses, shards_of(model), parts


@pytest.mark.parametrize("name", OTHERS)
@on_ranks(2)
def test_a_step_in_parts_learns_what_a_whole_one_learns(name):
    losses, parameters, num_samples = _trained(name)
    for extension, parts_of_whole in ((MicroBatches(40), 1), (DrawnCuts(0), num_samples)):
        got, changed, parts = _trained(name, extension)
        assert got == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(changed, parameters, rtol=1e-4, atol=1e-6)
        assert parts > parts_of_whole
