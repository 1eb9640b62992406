"""Pipelines that learn costs, stopped and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from commons.distributed import BatchShuffler, Extension
from commons.extensions.learned_costs import LearnedCosts
from commons.sequence_batch import BaseBatch
from tests.commons.extensions.learned_costs.internals import _DELAY
from tests.commons.histories import TokenShuffler, draw_histories
from tests.commons.pipeline.ranking_pipelines import pipeline_of, sharded_ranking_model

STEPS, STOP = 44, 28


def learning_pipeline(
    name: str,
    settings: dict[str, Any],
    learns: bool = True,
    make_model: Callable[[], tuple[Any, Any]] = sharded_ranking_model,
    extensions: Sequence[Extension] = (),
) -> Any:
    """Returns a pipeline whose shuffler learns costs, and has other extensions."""
    learning = [LearnedCosts()] if learns else []
    shuffler = TokenShuffler(extensions=[*learning, *extensions], equal_rows=False, **settings)
    return pipeline_of(name, *make_model(), shuffler)


def learned(shuffler: BatchShuffler) -> LearnedCosts:
    """Returns what a shuffler learns by."""
    return next(extension for extension in shuffler.extensions if isinstance(extension, LearnedCosts))


def learned_by(pipeline: Any) -> LearnedCosts:
    """Returns what a pipeline learns by."""
    return learned(pipeline._stage._shuffler)


def batches_from(first: int) -> Iterator[BaseBatch]:
    for step in range(first, STEPS):
        yield draw_histories(np.random.default_rng((step, dist.get_rank())), 8)


def _plans(pipeline: Any, batches: Iterator[BaseBatch], steps: int) -> list[Any]:
    plans = []
    for _ in range(steps):
        pipeline.progress(batches)
        plans.append(pipeline.plan)
    return plans


def check_resumed(
    name: str,
    settings: dict[str, Any],
    make_model: Callable[[], tuple[Any, Any]] = sharded_ranking_model,
    make_extensions: Callable[[], Sequence[Extension]] = tuple,
) -> None:
    """Checks that a resumed pipeline plans as the one that went on, with what it had learned."""
    pipeline = learning_pipeline(name, settings, True, make_model, make_extensions())
    batches = batches_from(0)
    _plans(pipeline, batches, STOP)
    saved = learned_by(pipeline).state()
    rest = _plans(pipeline, batches, STEPS - STOP)
    other = learning_pipeline(name, settings, True, make_model, make_extensions())
    learned_by(other).load_state(saved)
    again = _plans(other, batches_from(STOP), STEPS - STOP)
    # Up to here, plans use the times before the stop alone.
    same = min(_DELAY, STEPS - STOP)
    assert same > 0 and rest[:same] == again[:same]
    assert rest[0].predicted_seconds is not None
