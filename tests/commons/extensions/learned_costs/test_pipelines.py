"""Pipelines that learn costs from the times of their steps."""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from commons.balance_meter import BalanceMeter
from commons.distributed import BatchShuffler
from commons.extensions.learned_costs import LearnedCosts
from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.extensions.learned_costs.learning_pipelines import (
    STEPS,
    batches_from,
    check_resumed,
    learned,
)
from tests.commons.histories import TokenShuffler
from tests.commons.perf_model.internals import ComputeSpan
from tests.commons.pipeline.ranking_pipelines import pipeline_of, sharded_ranking_model, steps_of
from tests.commons.pipeline.scored_samples import ScoredShuffler, Scorer, ddp, draw
from tests.on_ranks import on_ranks


def test_a_resumed_pipeline_plans_as_the_one_that_went_on(pools):
    pools(2).run(check_resumed, "none")


@on_ranks(2)
def test_models_that_wait_within_a_step_are_refused():
    shuffler = TokenShuffler(extensions=[LearnedCosts()])
    refused = error_of(pipeline_of, "none", nn.Sequential(nn.SyncBatchNorm(4)), None, shuffler)
    assert "ValueError: LearnedCosts: SyncBatchNorm waits for all ranks within a step" in refused


@pytest.mark.parametrize(
    ("name", "given"), [("semi_sync", {}), ("native", {"enqueue_batch_after_forward": True})]
)
@on_ranks(2)
def test_pipelines_that_wait_between_forward_and_backward_are_refused(name, given):
    shuffler = TokenShuffler(extensions=[LearnedCosts()])
    refused = error_of(lambda: pipeline_of(name, *sharded_ranking_model(), shuffler, **given))
    assert "waits for other ranks' next batches while learned_costs times a step" in refused


def _collectives(learns: bool) -> tuple[Counter[str], set[str]]:
    """Counts collectives of a run, except each step's exchange; and names the threads that wait for times."""
    shuffler = TokenShuffler(extensions=[LearnedCosts()] if learns else [], equal_rows=False)
    pipeline, waiting = pipeline_of("native", *sharded_ranking_model(), shuffler), set()

    def seconds(span: ComputeSpan) -> float:
        waiting.add(threading.current_thread().name)
        return unpatched(span)

    unpatched = ComputeSpan.seconds
    with recorded_collectives() as calls, mock.patch.object(ComputeSpan, "seconds", seconds):
        plans = [pipeline.plan for _ in steps_of(pipeline, batches_from(0))]
    assert learns == (plans[-1].predicted_seconds is not None)
    collectives = Counter(name for name, _ in calls)
    collectives["all_to_all_single"] -= sum(plan.moves for plan in plans)
    return collectives, waiting


def test_a_step_that_learns_has_as_many_collectives_and_its_thread_never_waits(pools):
    pool = pools(2)
    for (before, none), (during, waiting) in zip(
        pool.run(_collectives, False), pool.run(_collectives, True), strict=True
    ):
        assert during == before and before["all_gather"] > STEPS
        assert not none and waiting == {"plan ahead"}


@on_ranks(2)
def test_a_meter_and_learned_costs_share_the_clock_of_a_model():
    shuffler = ScoredShuffler("dict", extensions=[LearnedCosts()])
    pipeline, batches = _group_pipeline(shuffler), _scored_batches()
    hooks = len(pipeline._model._forward_pre_hooks)
    meter = BalanceMeter(pipeline, window=32)
    assert len(pipeline._model._forward_pre_hooks) == hooks > 0
    for _ in range(32):
        pipeline.progress(batches)
        meter.add()
    assert min(meter.close()["compute_ms"]) > 0 and learned(shuffler).cost() is not None


def _group_pipeline(shuffler: BatchShuffler) -> Any:
    model = Scorer("dict", "sum")
    return pipeline_of("none", ddp(model), torch.optim.SGD(model.parameters(), lr=0.0), shuffler)


def _scored_batches() -> Iterator[Any]:
    rng = np.random.default_rng(dist.get_rank())
    return iter([draw("dict", rng.integers(0, 1000, 6).tolist()) for _ in range(64)])


@on_ranks(3)
def test_a_shuffler_among_some_ranks_answers_for_its_pipeline():
    group = [dist.new_group(ranks) for ranks in ([0, 1], [2])][dist.get_rank() // 2]
    extensions = [LearnedCosts()]
    shuffler = ScoredShuffler("dict", process_group=group, extensions=extensions, equal_rows=False)
    pipeline = _group_pipeline(shuffler)
    assert len(list(steps_of(pipeline, _scored_batches()))) == 64
    other = ScoredShuffler("dict", process_group=group, extensions=[LearnedCosts()], equal_rows=False)
    resumed = _group_pipeline(other)
    learned(other).load_state(learned(shuffler).state())
    resumed.progress(_scored_batches())
    resumed.reset()
    facts = [
        learned(shuffler).cost() is not None,
        pipeline.plan.predicted_seconds is not None,
        resumed.plan.predicted_seconds is not None,  # from its first step on
    ]
    error = error_of(learned(shuffler).state, pipeline.plan)
    assert facts == [True] * 3
    assert error == "no error" or "in a pipeline, leave out the plan" in error
