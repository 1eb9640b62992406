"""The shuffler does not change what a step learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from commons.datasets import HSTUBatch
from commons.distributed import BatchShufflerFactory
from commons.perf_model import HSTUFlops
from hstu import batch_shuffler  # noqa: F401
from tests.gradient_comparison import (
    Comparison,
    check_equal,
    compare,
    dense_differences,
    step,
    window_gradients,
)
from tests.hstu.hstu_samples import NUM_CLASSES, VOCABULARY, Sample, hstu_batch, ranking_model

ROWS = 6


def _samples(rank: int, num_real: int, labelled: bool) -> list[Sample]:
    """A rank's samples, of very different lengths, the long ones on the first rank."""
    rng = np.random.default_rng(rank)

    def sample(items: int) -> Sample:
        ids, actions = rng.integers(0, VOCABULARY, items), rng.integers(0, NUM_CLASSES, items)
        return Sample(
            user=[int(rng.integers(0, VOCABULARY))],
            tags=rng.integers(0, VOCABULARY, rng.integers(0, 3)).tolist(),
            items=ids.tolist(),
            actions=actions.tolist(),
            num_candidates=0,
            labels=actions.tolist() if labelled else [],
        )

    longest = 40 if rank == 0 else 8
    return [sample(int(items)) for items in rng.integers(0, longest, num_real)]


def _batch(num_real: int, labelled: bool) -> HSTUBatch:
    """This rank's batch."""
    samples = _samples(dist.get_rank(), num_real, labelled)
    empty = Sample([], [], [], [], 0, [])
    batch = hstu_batch(samples + [empty] * (ROWS - num_real))
    batch.actual_batch_size = num_real
    return batch


SHUFFLER = {"type": "hstu", "flops": HSTUFlops(2, 16, 2, 4)}


def _compare(
    pipeline_name: str, num_real: tuple[int, ...], labelled: bool, equal_rows: bool = True
) -> Comparison:
    config = {**SHUFFLER, "equal_rows": equal_rows}
    return compare(ranking_model, pipeline_name, config, _batch(num_real[dist.get_rank()], labelled))


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
@pytest.mark.parametrize(
    ("num_real", "labelled"),
    [((6, 6), True), ((6, 3), True), ((5, 0), True), ((6, 5), False), ((4, 6, 1), True)],
    ids=["complete", "incomplete", "one rank empty", "no loss tokens", "three ranks"],
)
def test_gradients_are_equal_with_and_without_the_shuffler(pools, pipeline_name, num_real, labelled):
    results = pools(len(num_real)).run(_compare, pipeline_name, num_real, labelled)
    names = {name for norms, _ in results for name in norms}
    assert any("embedding_collections" in name for name in names)
    assert any("dense" in name for name in names)
    check_equal(results, has_loss=labelled)


def test_gradients_are_equal_where_rows_follow_the_load(pools):
    check_equal(pools(3).run(_compare, "native", (6, 4, 6), True, False), has_loss=True)


MICRO_BATCHES = {**SHUFFLER, "max_tokens_per_micro_batch": 50}  # the longest sample has more


def _compare_in_micro_batches(
    pipeline_name: str, num_real: tuple[int, ...], labelled: bool, config: dict[str, Any]
) -> tuple[Comparison, int]:
    batch = _batch(num_real[dist.get_rank()], labelled)
    needed = BatchShufflerFactory.create("identity", max_tokens_per_micro_batch=50).plan(batch)
    return compare(ranking_model, pipeline_name, config, batch), needed.num_micro_batches


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
@pytest.mark.parametrize(
    ("num_real", "labelled", "config"),
    [
        ((6, 6), True, MICRO_BATCHES),
        ((6, 1), True, MICRO_BATCHES),
        ((5, 0), True, {**MICRO_BATCHES}),
        ((6, 5), False, MICRO_BATCHES),
        ((4, 6, 1), True, MICRO_BATCHES),
        ((6, 6, 6), True, {**MICRO_BATCHES, "equal_rows": False, "partitioner": "rebalance"}),
        ((6, 6), True, {"type": "identity", "max_tokens_per_micro_batch": 50}),
        ((5, 0, 6), True, {"type": "identity", "max_tokens_per_micro_batch": 50}),
    ],
)
def test_gradients_in_micro_batches_are_those_of_whole_steps(
    pools, pipeline_name, num_real, labelled, config
):
    results = pools(len(num_real)).run(_compare_in_micro_batches, pipeline_name, num_real, labelled, config)
    check_equal([comparison for comparison, _ in results], has_loss=labelled)
    assert len({needed for _, needed in results}) > 1  # as loaded, some ranks would need more than others


def _window_against_none(pipeline_name: str, window: int, num_batches: tuple[int, ...]) -> Comparison:
    rank = dist.get_rank()
    batches = []
    for number in range(max(num_batches)):
        samples = _samples(rank + 10 * number, ROWS, True) if number < num_batches[rank] else []
        empty = Sample([], [], [], [], 0, [])
        batch = hstu_batch(samples + [empty] * (ROWS - len(samples)))
        batch.actual_batch_size = len(samples)
        batches.append(batch)
    one, several = (
        window_gradients(
            ranking_model(),
            pipeline_name,
            BatchShufflerFactory.create_from_config({**SHUFFLER, "window": steps, "verify": True}),
            batches,
        )
        for steps in (1, window)
    )
    assert sum(one[2]) == sum(several[2]) and one[2] != several[2]
    norms = {
        name: (float(one[0][name].square().sum()), float((one[0][name] - several[0][name]).square().sum()))
        for name in one[0]
    }
    return norms, (one[1], several[1])


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
@pytest.mark.parametrize(("window", "num_batches"), [(2, (2, 2)), (4, (4, 3))])
def test_gradients_of_a_window_are_those_of_its_steps(pools, pipeline_name, window, num_batches):
    results = pools(2).run(_window_against_none, pipeline_name, window, num_batches)
    check_equal(results, has_loss=True)


def _against_one_process(num_real: tuple[int, ...]) -> dict[str, float]:
    """Relative difference of dense gradients from those of the mean loss of all samples in one process."""
    shuffler = BatchShufflerFactory.create_from_config(SHUFFLER)
    steps, _ = step(ranking_model(), "native", shuffler, _batch(num_real[dist.get_rank()], labelled=True))
    model = ranking_model()
    loss_sum, output = model(
        hstu_batch([sample for rank, real in enumerate(num_real) for sample in _samples(rank, real, True)])
    )
    (loss_sum / len(output.labels)).backward()
    return dense_differences(steps, model)


def test_gradients_are_those_of_the_mean_over_all_loss_tokens(pools):
    for differences in pools(2).run(_against_one_process, (6, 3)):
        assert len(differences) > 10
        assert max(differences.values()) < 1e-5
