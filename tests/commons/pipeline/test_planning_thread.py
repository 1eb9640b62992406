"""Errors and delays in the planning thread, or in a loader, reach all ranks and hang none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShuffler
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.histories import histories
from tests.commons.pipeline.ranking_pipelines import ranking_pipeline, steps_of

STEPS = 48
FAILING_STEP = 30


class SlowShuffler(BatchShuffler):
    """Sleeps in planning; on rank 1 it may raise."""

    def __init__(self, raises: bool = False, **settings) -> None:
        super().__init__(**settings)
        self._rng = np.random.default_rng(dist.get_rank())
        self._raises = raises
        self._calls = 0

    def get_workloads(self, batch: BaseBatch) -> torch.Tensor:
        time.sleep(float(self._rng.choice([0.0, 0.002, 0.02], p=[0.6, 0.3, 0.1])))
        self._calls += 1
        if self._raises and dist.get_rank() == 1 and self._calls == FAILING_STEP:
            raise LookupError("no price for this sample")
        return batch.num_tokens() ** 2


def _loader(raises: bool) -> Iterator[BaseBatch]:
    for number in range(STEPS):
        if raises and dist.get_rank() == 1 and number == FAILING_STEP:
            raise OSError("the disk is gone")
        yield histories([1 + (number * (1 + dist.get_rank())) % 7] * 2)


def _train(pipeline_name: str, raises: str, groups: list[list[int]] | None = None) -> tuple[int, str]:
    """Returns how many steps were trained, and the error that ended them with its notes."""
    made = [dist.new_group(ranks) for ranks in groups or []]
    group = next((group for group in made if dist.get_rank(group) >= 0), None)
    shuffler = SlowShuffler(raises == "planner", process_group=group)
    pipeline = ranking_pipeline(pipeline_name, shuffler)
    steps: list[Any] = []
    error = error_of(steps.extend, steps_of(pipeline, _loader(raises == "loader")))
    return len(steps), error


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
def test_a_slow_planner_delays_but_does_not_stop(pools, pipeline_name):
    assert pools(2).run(_train, pipeline_name, "") == [(STEPS, "no error")] * 2


@pytest.mark.parametrize(
    ("raises", "cause", "groups"),
    [
        ("planner", "LookupError: no price for this sample", None),
        ("loader", "OSError: the disk is gone", None),
        ("planner", "LookupError: no price for this sample", [[0], [1, 2]]),
    ],
)
def test_an_error_of_one_rank_ends_all_with_its_cause(pools, raises, cause, groups):
    # Without an answer within a minute, the pool fails.
    results = pools(2 if groups is None else 3).run(_train, "native", raises, groups)
    for rank, (steps, error) in enumerate(results):
        assert steps == results[0][0] and FAILING_STEP - 8 < steps < FAILING_STEP
        assert error.startswith(cause) and (rank == 1 or "raised on rank 1" in error)


class _Files:
    """A loader that fails at some batches of rank 1, and goes on with the next; or leaves these out."""

    def __init__(self, failing: set[int], left_out: bool) -> None:
        self._numbers, self._failing, self._left_out = iter(range(12)), failing, left_out

    def __iter__(self):
        return self

    def __next__(self) -> BaseBatch:
        number = next(self._numbers)
        if number in self._failing:
            if self._left_out:
                return next(self)
            if dist.get_rank() == 1:
                raise OSError(f"file {number} cannot be read")
        return histories([1 + number + dist.get_rank()] * 2)


def _train_on(
    pipeline_name: str, failing: set[int], left_out: bool
) -> tuple[list[tuple[float, int]], list[str]]:
    """Returns the loss and the loss tokens of each step, and the errors on the way."""
    pipeline = ranking_pipeline(pipeline_name, SlowShuffler())
    loader, steps, errors = _Files(failing, left_out), [], []
    while True:
        try:
            pipeline.progress(loader)
            steps.append((float(pipeline.loss_sum), pipeline.loss_tokens))
        except StopIteration:
            return steps, errors
        except OSError as error:
            errors.append(str(error))


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
@pytest.mark.parametrize("failing", [{0}, {1, 2}, {5}, {6, 7, 11}, {0, 2, 3}])
def test_a_loader_that_fails_and_goes_on_loses_the_failed_step_alone(pools, pipeline_name, failing):
    expected = pools(2).run(_train_on, pipeline_name, failing, True)
    results = pools(2).run(_train_on, pipeline_name, failing, False)
    for (steps, errors), (expected_steps, _) in zip(results, expected, strict=True):
        assert errors == [f"file {number} cannot be read" for number in sorted(failing)]
        assert steps == expected_steps
