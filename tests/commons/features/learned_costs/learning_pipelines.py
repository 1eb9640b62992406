"""Pipelines that learn costs, stopped and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch.distributed as dist
from commons.distributed.learning import _DELAY

from commons.sequence_batch import BaseBatch
from tests.commons.histories import TokenShuffler, draw_histories
from tests.commons.pipeline.ranking_pipelines import pipeline_of, sharded_ranking_model

STEPS, STOP = 44, 28


def learning_pipeline(
    name: str,
    settings: dict[str, Any],
    cost: str | None = "learned",
    make_model: Callable[[], tuple[Any, Any]] = sharded_ranking_model,
) -> Any:
    return pipeline_of(name, *make_model(), TokenShuffler(cost=cost, equal_rows=False, **settings))


def batches_from(first: int) -> Iterator[BaseBatch]:
    for step in range(first, STEPS):
        yield draw_histories(np.random.default_rng((step, dist.get_rank())), 8)


def _plans(pipeline: Any, batches: Iterator[BaseBatch], steps: int) -> list[Any]:
    plans = []
    for _ in range(steps):
        pipeline.progress(batches)
        assert pipeline.compute_span.seconds() > 0
        plans.append(pipeline.plan)
    return plans


def check_resumed(
    name: str, settings: dict[str, Any], make_model: Callable[[], tuple[Any, Any]] = sharded_ranking_model
) -> None:
    """Checks that a resumed pipeline plans as the one that went on, with what it had learned."""
    pipeline = learning_pipeline(name, settings, make_model=make_model)
    batches = batches_from(0)
    _plans(pipeline, batches, STOP)
    saved = pipeline.learning_state()
    rest = _plans(pipeline, batches, STEPS - STOP)
    other = learning_pipeline(name, settings, make_model=make_model)
    other.load_learning_state(saved)
    again = _plans(other, batches_from(STOP), STEPS - STOP)
    # Up to here, plans use the times before the stop alone.
    same = min(_DELAY, STEPS - STOP)
    assert same > 0 and rest[:same] == again[:same]
    assert rest[0].predicted_seconds is not None
