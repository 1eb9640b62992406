"""The stage computes what the reference computes, which fits on a page."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import PARTITIONERS
from tests import reference
from tests.commons.histories import HistoryBatch, TokenShuffler, histories
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
    for got, wanted in zip(local_tensors(model), local_tensors(plain), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def local_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns this rank's parameters, sharded ones included."""
    values = model.state_dict().values()
    shards = [value.local_shards() if hasattr(value, "local_shards") else [value] for value in values]
    return [getattr(shard, "tensor", shard).detach() for of_value in shards for shard in of_value]
