"""The forward of a model does not wait for the device if its batch was exchanged."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShufflerFactory, IdentityShuffler
from commons.features.micro_batches import MicroBatches
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model
from tests.commons.distributed.counted_collectives import recorded_synchronizations
from tests.commons.features.sample_splitting.drawn_cuts import DrawnCuts
from tests.commons.pipeline.ranking_pipelines import pipeline_of, steps_of
from tests.gradient_models import CASES
from tests.on_ranks import on_ranks

CHECKED_ON_CPU_ONLY = {"hstu/models/action_loss.py _check"}


def _loss_and_gradients(model: torch.nn.Module, batch: BaseBatch) -> list[torch.Tensor]:
    loss, _ = model(batch)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


@pytest.mark.parametrize("name", CASES)
def test_training_on_an_exchanged_batch_reads_nothing_back(name):
    case, shuffler = CASES[name], IdentityShuffler()
    model, batch = case.make_model(), case.make_batch(case.samples(0, 4))
    exchanged = shuffler.exchange(batch, shuffler.plan(batch))
    with recorded_synchronizations() as found:
        expected = _loss_and_gradients(model, batch)
    assert set(found) - CHECKED_ON_CPU_ONLY
    with recorded_synchronizations() as found:
        got = _loss_and_gradients(model, exchanged)
    assert set(found) <= CHECKED_ON_CPU_ONLY
    assert got[0] != 0
    for one, other in zip(got, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize(
    "features", [[], [MicroBatches(40)], [DrawnCuts(0)]], ids=["whole", "micro-batches", "pieces"]
)
@on_ranks(2)
def test_a_pipeline_passes_its_plan_on_to_the_model(features):
    """Its dense part reads nothing back either, sharded lookups included."""
    case, rank = CASES["ranking"], dist.get_rank()
    model, optimizer = shard_model(case.make_model(), OptimizerArgs("sgd", 0.01), torch.device("cpu"))
    places: list[str] = []

    class Recorded(torch.nn.Module):
        def __init__(self, dense: torch.nn.Module) -> None:
            super().__init__()
            self.dense = dense

        def forward(self, *args: Any) -> Any:
            with recorded_synchronizations() as found:
                output = self.dense(*args)
            places.extend(found)
            return output

    model.module.dense = Recorded(model.module.dense)
    shuffler = BatchShufflerFactory.create_from_config(
        {**case.shuffler, "equal_rows": False, "features": features}
    )
    pipeline = pipeline_of("native", model, optimizer, shuffler)
    batches = [case.make_batch(case.samples(rank + 10 * number, 4)) for number in range(4)]
    for _ in steps_of(pipeline, batches):
        places.append("step")
    assert places.count("step") == 4
    assert set(places) == CHECKED_ON_CPU_ONLY | {"step"}
