"""The shuffler does not change what a step of retrieval learns."""

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
from tests.hstu.retrieval_samples import NUM_ACTIONS, VOCABULARY, Sample, retrieval_batch, retrieval_model

ROWS = 6
NEGATIVES = 20
SHUFFLER = {"type": "hstu", "flops": HSTUFlops(2, 16, 2, 4)}
MICRO_BATCHES = {**SHUFFLER, "max_tokens_per_micro_batch": 50}  # the longest sample has more


def _samples(rank: int, num_real: int, labelled: bool) -> list[Sample]:
    """A rank's samples, of very different lengths, the long ones on the first rank."""
    rng = np.random.default_rng(rank)
    longest = 40 if rank == 0 else 8
    return [
        Sample(
            items=rng.integers(0, VOCABULARY, items).tolist(),
            actions=rng.integers(0, NUM_ACTIONS, items).tolist(),
            negatives=rng.integers(0, VOCABULARY, NEGATIVES).tolist(),
            user=[int(rng.integers(0, VOCABULARY))],
            num_labels=None if labelled else 0,
        )
        for items in rng.integers(0, longest, num_real).tolist()
    ]


def _batch(num_real: tuple[int, ...], labelled: bool = True) -> HSTUBatch:
    """This rank's batch."""
    real = num_real[dist.get_rank()]
    return retrieval_batch(_samples(dist.get_rank(), real, labelled), num_padding=ROWS - real)


def _compare(
    pipeline_name: str, num_real: tuple[int, ...], labelled: bool, config: dict[str, Any]
) -> Comparison:
    return compare(retrieval_model, pipeline_name, config, _batch(num_real, labelled))


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
@pytest.mark.parametrize(
    ("num_real", "labelled", "config"),
    [
        ((6, 6), True, SHUFFLER),
        ((6, 3), True, {**SHUFFLER, "verify": True}),
        ((5, 0), True, SHUFFLER),
        ((6, 5), False, SHUFFLER),
        ((4, 6, 1), True, SHUFFLER),
        ((6, 4, 6), True, {**SHUFFLER, "equal_rows": False}),
        ((6, 6), True, MICRO_BATCHES),
        ((5, 0), True, {**MICRO_BATCHES}),
        ((4, 6, 1), True, MICRO_BATCHES),
        ((5, 0, 6), True, {"type": "identity", "max_tokens_per_micro_batch": 50}),
    ],
)
def test_gradients_are_those_of_whole_steps_without_the_shuffler(
    pools, pipeline_name, num_real, labelled, config
):
    results = pools(len(num_real)).run(_compare, pipeline_name, num_real, labelled, config)
    names = {name for norms, _ in results for name in norms}
    assert any("item_table" in name for name in names) and any("query_projection" in name for name in names)
    check_equal(results, has_loss=labelled)


def _window_against_none(pipeline_name: str, num_batches: tuple[int, ...]) -> Comparison:
    rank = dist.get_rank()
    batches = [
        retrieval_batch(samples, num_padding=ROWS - len(samples))
        for number in range(max(num_batches))
        for samples in [_samples(rank + 10 * number, ROWS if number < num_batches[rank] else 0, True)]
    ]
    (one, one_loss, _), (several, several_loss, _) = (
        window_gradients(
            retrieval_model(),
            pipeline_name,
            BatchShufflerFactory.create_from_config({**SHUFFLER, "window": steps, "verify": True}),
            batches,
        )
        for steps in (1, max(num_batches))
    )
    norms = {
        name: (float(value.square().sum()), float((value - several[name]).square().sum()))
        for name, value in one.items()
    }
    return norms, (one_loss, several_loss)


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
@pytest.mark.parametrize("num_batches", [(2, 2), (4, 3)])
def test_gradients_of_a_window_are_those_of_its_steps(pools, pipeline_name, num_batches):
    check_equal(pools(2).run(_window_against_none, pipeline_name, num_batches), has_loss=True)


def _against_one_process(num_real: tuple[int, ...]) -> dict[str, float]:
    """Relative difference of dense gradients from those of the mean loss of all samples in one process."""
    shuffler = BatchShufflerFactory.create_from_config(SHUFFLER)
    steps, _ = step(retrieval_model(), "native", shuffler, _batch(num_real))
    model = retrieval_model()
    samples = [sample for rank, real in enumerate(num_real) for sample in _samples(rank, real, True)]
    loss_sum, output = model(retrieval_batch(samples))
    (loss_sum / len(output.targets)).backward()
    return dense_differences(steps, model)


def test_gradients_are_those_of_the_mean_over_all_loss_tokens(pools):
    for differences in pools(2).run(_against_one_process, (6, 3)):
        assert len(differences) > 10
        assert max(differences.values()) < 1e-5
