"""Ranks whose loaders end at different steps stop in the same call, and no sample is left out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShufflerFactory
from commons.perf_model import HSTUFlops
from commons.pipeline import TrainPipelineFactory
from commons.training import OptimizerArgs, shard_model
from hstu import batch_shuffler  # noqa: F401
from tests.hstu.hstu_samples import Sample, hstu_batch, ranking_model

BATCHES = (3, 6)
ITEMS = (2, 5)  # per sample, by rank
ROWS = 4


def _progress_to_the_end(pipeline_name: str, shuffler_name: str) -> list[tuple[float, int]]:
    """Loss sum of this rank and global loss tokens of each step, over two passes of the loaders."""
    device = torch.device("cpu")
    model, optimizer = shard_model(ranking_model(), OptimizerArgs("sgd", 0.01), device)
    arguments = {"flops": HSTUFlops(2, 16, 2, 4)} if shuffler_name == "hstu" else {}
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=model,
        optimizer=optimizer,
        device=device,
        batch_shuffler=BatchShufflerFactory.create(shuffler_name, **arguments),
        loss_reduction="sum",
    )
    rank = dist.get_rank()
    items = list(range(1, 1 + ITEMS[rank]))
    actions = [item % 5 for item in items]
    sample = Sample([rank], [], items, actions, 0, actions)
    steps = []
    for _ in range(2):
        batches = iter([hstu_batch([sample] * ROWS) for _ in range(BATCHES[rank])])
        while True:
            try:
                loss_sum, loss_tokens, _ = pipeline.progress(batches)
            except StopIteration:
                break
            steps.append((float(loss_sum), loss_tokens))
    return steps


def _tokens_after_reset(pipeline_name: str) -> int:
    device = torch.device("cpu")
    model, optimizer = shard_model(ranking_model(), OptimizerArgs("sgd", 0.01), device)
    shuffler = BatchShufflerFactory.create("hstu", flops=HSTUFlops(2, 16, 2, 4))
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=model,
        optimizer=optimizer,
        device=device,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )
    long, short = (Sample([1], [], [1] * items, [1] * items, 0, [1] * items) for items in (9, 2))
    pipeline.progress(iter([hstu_batch([long] * ROWS) for _ in range(4)]))
    pipeline.reset()
    return pipeline.progress(iter([hstu_batch([short] * ROWS)]))[1]


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
def test_reset_forgets_the_batches_on_their_way(pools, pipeline_name):
    assert pools(2).run(_tokens_after_reset, pipeline_name) == [2 * ROWS * 2] * 2


@pytest.mark.parametrize("shuffler_name", ["hstu", "identity"])
@pytest.mark.parametrize("pipeline_name", ["none", "native"])
def test_all_ranks_stop_in_the_same_call(pools, pipeline_name, shuffler_name):
    first, second = pools(2).run(_progress_to_the_end, pipeline_name, shuffler_name)
    both, one = ROWS * sum(ITEMS), ROWS * ITEMS[1]
    for steps in (first, second):
        assert [tokens for _, tokens in steps] == ([both] * 3 + [one] * 3) * 2
    if shuffler_name == "hstu":  # the rank that ran dry goes on working
        assert all(loss > 0 for loss, _ in first)
