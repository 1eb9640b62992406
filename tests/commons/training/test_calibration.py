"""Costs from measured steps, and training balanced by them."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.perf_model import MeasuredCost
from commons.perf_model.calibrate import MeasuredSteps
from commons.training import OptimizerArgs, TrainerArgs
from commons.training.calibration import LEAST_STEPS, measure_steps
from tests.commons.training.small_task import small_task
from tests.commons.training.test_trainer import CountedLabels, _dataset, _train
from tests.hstu.hstu_samples import ranking_model


def _measured(cap: int | None) -> tuple[MeasuredSteps, list[float]]:
    task = small_task(ranking_model(), _dataset(27, False), _dataset(13, False), CountedLabels())
    args = TrainerArgs(
        train_batch_size=4,
        enable_balanced_shuffler=True,
        max_tokens_per_micro_batch=cap,
        pipeline_type="none",
    )
    steps = measure_steps(task, args, OptimizerArgs("sgd", 0.05), torch.device("cpu"), seconds=0.0)
    own = np.split(steps.seconds, dist.get_world_size())[dist.get_rank()]
    return steps, own.tolist()


@pytest.mark.parametrize("cap", [None, 30])
def test_all_ranks_have_the_steps_of_all(pools, cap):
    of_ranks = pools(2).run(_measured, cap)
    (steps, first), (_, second) = of_ranks
    assert steps.seconds.tolist() == first + second and min(first + second) > 0
    assert len(first) == len(second) == LEAST_STEPS
    assert set(steps.samples.tolist()) == {1.0, 2.0, 4.0}  # 27 in steps of 8
    assert (steps.squared_tokens >= steps.tokens).all() and (steps.loads > 0).all()
    assert steps.fit().median_error < 1


def test_training_is_balanced_by_the_measured_cost(pools, tmp_path):
    MeasuredCost(0.0, 1e-3, 0.0, 0.0).save(tmp_path / "cost.json")
    settings = {"enable_balanced_shuffler": True, "balance_cost": str(tmp_path / "cost.json")}
    pools(2).run(partial(_train, str(tmp_path), **settings))
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for line in (line for line in lines if line["kind"] == "train"):
        assert line["loads_after"] == pytest.approx([1e6 * samples for samples in line["samples_after"]])


def test_a_cost_that_is_not_there_is_named_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cost.json does not exist"):
        TrainerArgs(train_batch_size=1, balance_cost=str(tmp_path / "cost.json"))
