"""Over whole epochs nothing is lost and nothing doubled, however the ranks load and whatever is planned."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.datasets import HSTUBatch
from commons.distributed import BatchShufflerFactory
from commons.perf_model import HSTUFlops
from commons.pipeline import TrainPipelineFactory
from commons.training import OptimizerArgs, shard_model
from hstu import batch_shuffler  # noqa: F401
from tests.hstu.hstu_samples import VOCABULARY, Sample, hstu_batch, ranking_model

ROWS = 3
EPOCHS = 2


@dataclass(frozen=True)
class Loading:
    """How many batches each rank loads in an epoch, and how many ranks' rows are in each of them."""

    num_batches: tuple[int, ...]
    ranks_in_a_batch: int = 1


EVEN = Loading((5, 5))
UNEVEN = Loading((6, 3))
ENDED_AT_ONCE = Loading((4, 1, 0))
ON_ONE_RANK = Loading((5, 0), ranks_in_a_batch=2)


def _batch(rng: np.random.Generator, rows: int) -> HSTUBatch:
    num_real = int(rng.integers(0, rows + 1)) if rng.random() < 0.4 else rows

    def sample() -> Sample:
        items = rng.integers(0, VOCABULARY, min(int(rng.lognormal(1.5, 1.0)), 30)).tolist()
        actions = [item % 5 for item in items]
        return Sample([int(rng.integers(0, VOCABULARY))], [], items, actions, 0, actions)

    empty = Sample([], [], [], [], 0, [])
    batch = hstu_batch([sample() for _ in range(num_real)] + [empty] * (rows - num_real))
    batch.actual_batch_size = num_real
    return batch


def _contents(batch: HSTUBatch) -> list[tuple]:
    of_features = batch.features.to_dict()
    columns = [of_features[key].to_dense() for key in ("user", "item", "action")]
    columns.append(batch.labels["label"].to_dense())
    return [tuple(tuple(column[row].tolist()) for column in columns) for row in range(batch.num_samples)]


def _epochs(pipeline_name: str, loading: Loading, seed: int, **settings):
    """Per epoch, on one rank: what was loaded; of each step what was computed, its rows and loss tokens."""
    device, rank = torch.device("cpu"), dist.get_rank()
    model, optimizer = shard_model(ranking_model(), OptimizerArgs("sgd", 0.01), device)
    shuffler = BatchShufflerFactory.create("hstu", flops=HSTUFlops(2, 16, 2, 4), verify=True, **settings)
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=model,
        optimizer=optimizer,
        device=device,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )
    computed = []
    forward = pipeline._stage.forward

    def recording_forward(model, batch):
        computed.append(batch)
        return forward(model, batch)

    pipeline._stage.forward = recording_forward
    rng = np.random.default_rng((seed, rank))
    results = []
    for _ in range(EPOCHS):
        rows = ROWS * loading.ranks_in_a_batch
        batches = [_batch(rng, rows) for _ in range(loading.num_batches[rank])]
        loaded = [content for batch in batches for content in _contents(batch)]
        loader = iter(batches)
        computed.clear()
        tokens = []
        while True:
            try:
                tokens.append(pipeline.progress(loader)[1])
            except StopIteration:
                break
        results.append((loaded, [(_contents(batch), batch.batch_size) for batch in computed], tokens))
    return results


def _check(results, loading: Loading, window: int, equal_rows: bool) -> None:
    for of_ranks in zip(*results, strict=True):
        loaded = Counter(content for of_rank, _, _ in of_ranks for content in of_rank)
        computed = Counter(content for _, steps, _ in of_ranks for step, _ in steps for content in step)
        assert loaded == computed
        num_steps = max(loading.num_batches)
        assert [len(steps) for _, steps, _ in of_ranks] == [num_steps] * len(of_ranks)
        assert all(tokens == of_ranks[0][2] for _, _, tokens in of_ranks)
        for step in range(num_steps):
            samples = [content for _, steps, _ in of_ranks for content in steps[step][0]]
            assert of_ranks[0][2][step] == sum(len(labels) for *_, labels in samples)
            if equal_rows:
                assert len({steps[step][1] for _, steps, _ in of_ranks}) == 1


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
@pytest.mark.parametrize("equal_rows", [True, False], ids=["equal", "unequal"])
@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize(
    "loading",
    [EVEN, UNEVEN, ENDED_AT_ONCE, ON_ONE_RANK],
    ids=["even", "uneven", "ended at once", "on one rank"],
)
def test_every_sample_is_computed_once(pools, pipeline_name, equal_rows, window, loading):
    pool = pools(len(loading.num_batches))
    seed = window * 10 + equal_rows
    settings = {"equal_rows": equal_rows, "window": window}
    results = pool.run(_run, pipeline_name, loading, seed, settings)
    _check(results, loading, window, equal_rows)


def _run(pipeline_name, loading, seed, settings):
    return _epochs(pipeline_name, loading, seed, **settings)


@pytest.mark.parametrize("partitioner", ["rebalance", "karmarkar_karp"])
@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
def test_every_sample_is_computed_once_by_other_settings(pools, partitioner, exchange):
    settings = {"partitioner": partitioner, "exchange": exchange}
    _check(pools(2).run(_run, "native", UNEVEN, 7, settings), UNEVEN, 1, True)


def _one_batch_at_a_time(pipeline_name: str, num_batches: int) -> list[int]:
    """Loss tokens of each step, where each is given an iterator of its own."""
    device = torch.device("cpu")
    model, optimizer = shard_model(ranking_model(), OptimizerArgs("sgd", 0.01), device)
    shuffler = BatchShufflerFactory.create("hstu", flops=HSTUFlops(2, 16, 2, 4), verify=True)
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=model,
        optimizer=optimizer,
        device=device,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )
    steps = []
    for number in range(1, num_batches + 1):
        items = [1] * (number + dist.get_rank())
        batch = hstu_batch([Sample([1], [], items, items, 0, items)] * ROWS)
        steps.append(pipeline.progress(iter([batch]))[1])
    return steps


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
def test_a_new_iterator_for_each_step_gives_each_its_batch(pools, pipeline_name):
    expected = [ROWS * (number + number + 1) for number in range(1, 5)]
    assert pools(2).run(_one_batch_at_a_time, pipeline_name, 4) == [expected] * 2


def _balanced_in_groups(
    groups: list[list[int]], window: int, num_batches: tuple[int, ...]
) -> list[tuple[int, float]]:
    """Global loss tokens and largest load of each step, where some ranks balance among each other."""
    device, rank = torch.device("cpu"), dist.get_rank()
    (group,) = [
        group for ranks, group in zip(groups, map(dist.new_group, groups), strict=True) if rank in ranks
    ]
    model, optimizer = shard_model(ranking_model(), OptimizerArgs("sgd", 0.01), device)
    shuffler = BatchShufflerFactory.create(
        "hstu", flops=HSTUFlops(2, 16, 2, 4), process_group=group, window=window
    )
    pipeline = TrainPipelineFactory.create(
        "native",
        model=model,
        optimizer=optimizer,
        device=device,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )
    rng = np.random.default_rng(rank)
    loader = iter([_batch(rng, ROWS) for _ in range(num_batches[rank])])
    steps = []
    while True:
        try:
            _, tokens, _ = pipeline.progress(loader)
        except StopIteration:
            return steps
        steps.append((tokens, float(pipeline.report.loads_after.max())))


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    ("groups", "num_batches"),
    [([[0, 1], [2, 3]], (5, 2, 1, 1)), ([[0, 1], [2, 3]], (0, 5, 0, 0)), ([[0, 2], [1]], (2, 5, 3))],
    ids=["earlier", "at once", "one alone"],
)
def test_groups_whose_loaders_have_ended_go_on_with_padding(pools, window, groups, num_batches):
    results = pools(len(num_batches)).run(_balanced_in_groups, groups, window, num_batches)
    assert len(results[0]) == 5 and all(steps == results[0] for steps in results)
