"""What goes wrong, or slowly, in the planning thread or in a loader, reaches all ranks and stops none."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShuffler
from commons.pipeline import TrainPipelineFactory
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model
from tests.hstu.hstu_samples import Sample, hstu_batch, ranking_model

STEPS = 200
FAILING_STEP = 120


class SlowShuffler(BatchShuffler):
    """Sleeps in planning; on rank 1 it may raise."""

    def __init__(self, raises: bool = False, **settings) -> None:
        super().__init__(verify=True, **settings)
        self._rng = np.random.default_rng(dist.get_rank())
        self._raises = raises
        self._calls = 0

    def get_workloads(self, batch: BaseBatch) -> torch.Tensor:
        time.sleep(float(self._rng.choice([0.0, 0.002, 0.02], p=[0.6, 0.3, 0.1])))
        self._calls += 1
        if self._raises and dist.get_rank() == 1 and self._calls == FAILING_STEP:
            raise LookupError("no price for this sample")
        return batch.num_tokens() ** 2


def _loader(raises: bool = False) -> Iterator[BaseBatch]:
    rng = np.random.default_rng(dist.get_rank())
    for number in range(STEPS):
        if raises and dist.get_rank() == 1 and number == FAILING_STEP:
            raise OSError("the disk is gone")
        lengths = rng.integers(1, 8, 2)
        yield hstu_batch([Sample([1], [], [1] * n, [1] * n, 0, [1] * n) for n in lengths])


def _train(pipeline_name: str, raises: str, window: int = 1) -> tuple[int, str, float]:
    """Steps trained, the error that ended them, and its notes; the seconds since the last step."""
    device = torch.device("cpu")
    shuffler = SlowShuffler(raises == "planner", window=window)
    model, optimizer = shard_model(ranking_model(), OptimizerArgs("sgd", 0.01), device)
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=model,
        optimizer=optimizer,
        device=device,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )
    loader = _loader(raises == "loader")
    steps, last = 0, time.monotonic()
    while True:
        try:
            pipeline.progress(loader)
        except StopIteration:
            return steps, "", 0.0
        except Exception as error:
            notes = " ".join(getattr(error, "__notes__", []))
            return steps, f"{type(error).__name__}: {error} {notes}", time.monotonic() - last
        steps, last = steps + 1, time.monotonic()


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
def test_a_slow_planner_delays_but_does_not_stop(pools, pipeline_name):
    assert pools(2).run(_train, pipeline_name, "") == [(STEPS, "", 0.0)] * 2


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize(
    ("raises", "cause"),
    [("planner", "LookupError: no price for this sample"), ("loader", "OSError: the disk is gone")],
)
def test_an_error_of_one_rank_ends_all_with_its_cause(pools, raises, cause, window):
    elsewhere, here = pools(2).run(_train, "native", raises, window)
    assert elsewhere[0] == here[0] and FAILING_STEP - 8 < here[0] < FAILING_STEP
    assert here[1].startswith(cause) and elsewhere[1].startswith(cause)
    assert "raised on rank 1" in elsewhere[1]
    assert max(elsewhere[2], here[2]) < 60


def _planner_fails_in_a_part_of_the_ranks() -> str:
    pairs = [dist.new_group(ranks) for ranks in ([0], [1, 2])]
    rank = dist.get_rank()
    device = torch.device("cpu")
    model, optimizer = shard_model(ranking_model(), OptimizerArgs("sgd", 0.01), device)
    shuffler = SlowShuffler(raises=True, process_group=pairs[min(rank, 1)])
    pipeline = TrainPipelineFactory.create(
        "native",
        model=model,
        optimizer=optimizer,
        device=device,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )
    loader = _loader()
    while True:
        try:
            pipeline.progress(loader)
        except LookupError as error:
            return str(error)


def test_ranks_that_balance_among_others_are_told_too(pools):
    assert pools(3).run(_planner_fails_in_a_part_of_the_ranks) == ["no price for this sample"] * 3
