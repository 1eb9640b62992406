"""The forward of a model does not wait for the device if its batch was exchanged."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShufflerFactory, Feature, IdentityShuffler
from commons.features.micro_batches import MicroBatches
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model
from tests.commons.distributed.counted_collectives import recorded_synchronizations
from tests.commons.features.sample_splitting.drawn_cuts import DrawnCuts
from tests.commons.pipeline.ranking_pipelines import pipeline_of, steps_of
from tests.gradient_models import CASES
from tests.hstu import hstu_samples, retrieval_samples
from tests.hstu.hstu_samples import hstu_batch, ranking_model
from tests.hstu.retrieval_samples import retrieval_batch, retrieval_model
from tests.sid_gr import sid_samples
from tests.sid_gr.sid_samples import sid_batch, sid_gr_model

RECOMPUTE = {"recompute_input_layernorm": True, "recompute_input_silu": True}
CHECKED_ON_CPU_ONLY = {"hstu/models/action_loss.py _check"}


def _ranking_batch(with_candidates: bool) -> BaseBatch:
    rows = [
        hstu_samples.Sample([3], [1, 2], [5, 6, 7], [0, 1, 2], 1, [2]),
        hstu_samples.Sample([], [], [], [], 0, []),
        hstu_samples.Sample([4], [1], [5, 6], [1, 2], 2, [1, 2]),
    ]
    batch = hstu_batch(rows)
    if not with_candidates:
        batch.max_num_candidates, batch.num_candidates = 0, None
    return batch


def _retrieval_batch() -> BaseBatch:
    rows = [([1, 2, 3], [1, 2, 3], [5, 6], [1]), ([4], [1], [7], []), ([1, 2], [1, 1], [], [3])]
    return retrieval_batch([retrieval_samples.Sample(*row) for row in rows], num_padding=1)


def _sid_batch() -> BaseBatch:
    return sid_batch([sid_samples.Sample([1, 2], [3], [1, 2]), sid_samples.Sample([], [4, 5], [])], 3)


def _loss_and_gradients(model: torch.nn.Module, batch: BaseBatch) -> list[torch.Tensor]:
    loss, _ = model(batch)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


@pytest.mark.parametrize(
    ("make_model", "batch"),
    [
        (ranking_model, _ranking_batch(with_candidates=True)),
        (partial(ranking_model, **RECOMPUTE), _ranking_batch(with_candidates=False)),
        (retrieval_model, _retrieval_batch()),
        (sid_gr_model, _sid_batch()),
    ],
    ids=["ranking with candidates", "ranking with recomputation", "retrieval", "SID-GR"],
)
def test_training_on_an_exchanged_batch_reads_nothing_back(make_model, batch):
    model, shuffler = make_model(), IdentityShuffler()
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


def _reads_in_a_pipeline(*features: Feature) -> list[str]:
    """Reads from the dense part of a model that a pipeline runs, sharded lookups included."""
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
    return places


@pytest.mark.parametrize(
    "features", [[], [MicroBatches(40)], [DrawnCuts(0)]], ids=["whole", "micro-batches", "pieces"]
)
def test_a_pipeline_passes_its_plan_on_to_the_model(pools, features):
    for places in pools(2).run(_reads_in_a_pipeline, *features):
        assert places.count("step") == 4
        assert set(places) == CHECKED_ON_CPU_ONLY | {"step"}
