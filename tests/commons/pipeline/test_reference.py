"""The stage computes what the reference computes, which fits on a page."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import PARTITIONERS
from tests import reference
from tests.commons.histories import HistoryBatch, TokenShuffler, histories
from tests.commons.pipeline.click_models import shards_of
from tests.commons.pipeline.ranking_pipelines import pipeline_of, sharded_ranking_model, steps_of
from tests.on_ranks import on_ranks

STEPS, ROWS = 3, 5


def batches() -> list[HistoryBatch]:
    """Draws batches in which rank 0 has the longest histories, and each rank another number of samples."""
    rank = dist.get_rank()
    rng = np.random.default_rng(rank)
    longest = 30 if rank == 0 else 6
    return [
        histories(rng.integers(1, longest, ROWS), rng, num_real=ROWS - (rank + step) % 3)
        for step in range(STEPS)
    ]


@on_ranks(3)
def test_karmarkar_karps_samples_are_the_references_bit_for_bit():
    shuffler = TokenShuffler(partitioner="karmarkar_karp")
    for batch in batches():
        plan = shuffler.plan(batch)
        moved = shuffler.exchange(batch, plan)
        expected, num_labels = reference.balanced(batch, shuffler.get_workloads(batch))
        assert plan.moves and plan.num_loss_tokens == num_labels
        for sample, wanted in zip(reference.samples_of(moved), expected, strict=True):
            assert sample.keys() == wanted.keys()
            assert all(sample[name].equal(wanted[name]) for name in sample)


@pytest.mark.parametrize(("partitioner", "name"), [*product(PARTITIONERS, ["none"]), ("rebalance", "native")])
@on_ranks(3)
def test_every_partitioner_trains_as_the_reference(partitioner, name):
    shuffler = TokenShuffler(partitioner=partitioner)
    model, optimizer = sharded_ranking_model(learning_rate=0.5)
    pipeline = pipeline_of(name, model, optimizer, shuffler, "sum")
    losses = []
    for loss_sum, num_labels, _ in steps_of(pipeline, batches()):
        dist.all_reduce(loss_sum)
        losses.append(float(loss_sum) / num_labels)
    plain, optimizer = sharded_ranking_model(learning_rate=0.5)
    expected = [reference.step(plain, optimizer, batch, shuffler.get_workloads(batch)) for batch in batches()]
    assert losses == pytest.approx(expected, rel=1e-5) and len(set(losses)) == STEPS
    torch.testing.assert_close(shards_of(model), shards_of(plain), rtol=1e-5, atol=1e-6)
