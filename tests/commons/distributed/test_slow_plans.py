"""Plans that take longer than a step are named once; a slow plan now and then is not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from commons.distributed import PARTITIONERS, BatchShuffler, Extension
from commons.partition import longest_processing_time
from commons.pipeline import TrainPipelineFactory
from tests.commons.distributed.errors_and_warnings import warnings_of

STEPS = 100
ROWS = 4
NAMED = "every step waits for its plan"


class SlowShuffler(BatchShuffler):
    """Sleeps in some calls."""

    def __init__(self, seconds: float, every: int = 1, **settings) -> None:
        super().__init__(**settings)
        self._seconds, self._every, self._calls = seconds, every, 0

    def get_workloads(self, batch):
        self._calls += 1
        time.sleep(self._seconds if self._calls % self._every == 0 else 0.0)
        return torch.ones(ROWS, dtype=torch.int64)


def _batches() -> Iterator[dict[str, torch.Tensor]]:
    return ({"ids": torch.full((ROWS, 1), float(number))} for number in range(STEPS))


def _own_loop(shuffler: BatchShuffler, step_seconds: float) -> None:
    for _ in shuffler.plan_ahead(_batches()):
        time.sleep(step_seconds)


def _warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if NAMED in record.message]


def test_slow_workloads_are_named_once_with_both_times(caplog):
    _own_loop(SlowShuffler(0.02), 0.001)
    [warning] = _warnings(caplog)
    planning, step = (float(words.split()[-1]) for words in warning.split(" ms")[:2])
    assert planning >= 20 > step >= 1
    assert warning.endswith("; make SlowShuffler.get_workloads faster")


@pytest.mark.parametrize(("seconds", "every"), [(0.0, 1), (0.1, 10)])
def test_a_plan_that_a_step_hides_is_not_named_nor_one_that_is_slow_now_and_then(caplog, seconds, every):
    _own_loop(SlowShuffler(seconds, every), 0.01)
    assert not _warnings(caplog)


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, batch):
        losses = self.weight * batch["ids"]
        return losses.sum(), losses.detach()


def test_pipelines_name_slow_plans(caplog):
    model = Sum()
    pipeline = TrainPipelineFactory.create(
        "none",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.0),
        device=torch.device("cpu"),
        batch_shuffler=SlowShuffler(0.05),
        loss_reduction="sum",
    )
    batches = _batches()
    for _ in range(50):
        pipeline.progress(batches)
    pipeline.reset()
    assert len(_warnings(caplog)) == 1


def _slow_partitioner(workloads, num_partitions, equal_size=True):
    time.sleep(0.02)
    return longest_processing_time(workloads, num_partitions, equal_size)


def _warnings_of_slow_partitioner() -> list[str]:
    PARTITIONERS["slow"] = _slow_partitioner
    try:
        with warnings_of("commons") as messages:
            _own_loop(SlowShuffler(0.0, partitioner="slow"), 0.0)
    finally:
        del PARTITIONERS["slow"]
    return [message for message in messages if NAMED in message]


def test_rank_0_names_the_partitioner(pools):
    [warning], others = pools(2).run(_warnings_of_slow_partitioner)
    assert not others
    assert 'set partitioner="longest_processing_time" (TrainerArgs.balance_partitioner)' in warning


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, "raise tolerance (TrainerArgs.balance_tolerance)"),
        ({"partitioner": "longest_processing_time"}, "process_group="),
    ],
)
def test_the_setting_that_makes_planning_faster(settings, remedy):
    assert remedy in SlowShuffler(0.0, **settings).faster_planning()[1]


class Searching(Extension):
    """Takes long to place rows."""

    name, order = "searching", 0
    faster_without = "leave Searching out"


def test_a_extension_that_slows_planning_is_named_first():
    settings = {"partitioner": "longest_processing_time"}
    assert (
        SlowShuffler(0.0, extensions=[Searching()], **settings).faster_planning()[1] == "leave Searching out"
    )
