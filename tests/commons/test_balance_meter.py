"""The meter's figures are those counted by hand, and find the rank that is slow."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.balance_meter import BalanceMeter
from commons.distributed import Extension, ShufflePlan
from tests.commons.histories import TokenShuffler, histories
from tests.commons.pipeline.ranking_pipelines import RankingModel, pipeline_of, sharded, steps_of
from tests.on_ranks import on_ranks

WINDOW = 4


class Doubled(Extension):
    name, order = "doubled", 60

    def report(self, plan: ShufflePlan) -> dict[str, Any]:
        return {"doubled": 2 * float(plan.loads.max()), "steps": 1}


class SlowModel(RankingModel):
    def __init__(self) -> None:
        super().__init__()
        self.dense.register_forward_hook(lambda *_: time.sleep(0.1 * dist.get_rank()))


def slowly(batches: Iterable[Any]) -> Iterator[Any]:
    """Takes 30 ms more on rank 0."""
    for batch in batches:
        time.sleep(0.03 * (dist.get_rank() == 0))
        yield batch


def batches(count: int) -> list[Any]:
    drawn = [np.random.default_rng((dist.get_rank(), number)) for number in range(count)]
    return [histories(rng.lognormal(1.5, 1.0, 4).clip(1, 30), rng) for rng in drawn]


@pytest.mark.parametrize("name", ["none", "native"])
@on_ranks(2)
def test_a_window_is_the_mean_of_its_steps_over_all_ranks(name):
    model, optimizer = sharded(SlowModel())
    pipeline, evaluation = (
        pipeline_of(name, model, optimizer, TokenShuffler(extensions=[Doubled()])) for _ in range(2)
    )
    meter, ended = BalanceMeter(pipeline, WINDOW), []
    loaded = batches(2 * WINDOW)
    loader = slowly(loaded)
    losses, tokens, before, after, mean = 0.0, 0, 0.0, 0.0, 0.0
    assert meter.scalars() == {}
    for step in range(1, 2 * WINDOW + 1):
        pipeline.progress(loader)
        if step > WINDOW:
            total = pipeline.loss_sum.double()
            dist.all_reduce(total)
            losses, tokens = losses + float(total), tokens + pipeline.loss_tokens
            report = pipeline.report
            before, after = before + report.loads_before.max(), after + report.loads_after.max()
            mean += report.loads_before.mean()
        dist.all_reduce(pipeline.loss_sum)  # as loops do to log it
        ended.append(meter.step())
        if step == WINDOW:  # an evaluation is no part of a step
            model.eval()
            assert len(list(steps_of(evaluation, batches(2)))) == 2
            model.train()
    assert ended == ([False] * (WINDOW - 1) + [True]) * 2
    figures = meter.figures
    assert figures["loss"] == pytest.approx(losses / tokens)
    assert figures["imbalance_before"] == pytest.approx(before / mean)
    assert figures["imbalance_after"] == pytest.approx(after / mean)
    assert figures["imbalance_after"] < figures["imbalance_before"]
    assert figures["slowest_rank"] == 1 and figures["slowest_share"] >= 0.75  # machines are shared
    fast, slow = figures["compute_ms"]
    assert slow - fast > 40
    assert slow - 0.01 < figures["slowest_ms"] < 1e3 * figures["seconds_per_step"]
    assert figures["doubled"] == pytest.approx(2 * after / WINDOW) and "steps" not in figures
    if figures["slowest_share"] == 1.0:
        assert figures["slowest_ms"] == pytest.approx(slow, abs=0.01)
        assert figures["waiting_ms"] == pytest.approx([slow - fast, 0], abs=0.01)
        assert figures["imbalance_measured"] == pytest.approx(2 * slow / (fast + slow), rel=1e-3)
    assert figures["load_ms"][0] > 20 + figures["load_ms"][1]
    scalars = meter.scalars()
    assert scalars["loss"] == figures["loss"] and "compute_ms" not in scalars
    assert scalars["waiting_ms/largest"] == max(figures["waiting_ms"])
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, figures)
    assert everyone[0]["compute_ms"] == everyone[1]["compute_ms"]


def test_a_window_has_steps():
    with pytest.raises(ValueError, match="window=0; expected a number of steps"):
        BalanceMeter(torch.nn.Identity(), 0)
