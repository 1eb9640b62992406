"""Pipelines that learn costs, stopped and resumed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from commons.distributed import BatchShuffler, Extension
from commons.extensions.learned_costs import LearnedCosts
from commons.sequence_batch import BaseBatch
from tests.commons.histories import TokenShuffler, draw_histories
from tests.commons.pipeline.ranking_pipelines import pipeline_of, sharded_ranking_model

STEPS, STOP = 44, 28


def learned(shuffler: BatchShuffler) -> LearnedCosts:
    """Returns what a shuffler learns by."""
    return next(extension for extension in shuffler.extensions if isinstance(extension, LearnedCosts))


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
    make_model: Callable[[], tuple[Any, Any]] = sharded_ranking_model,
    make_extensions: Callable[[], Sequence[Extension]] = tuple,
) -> None:
    """Checks that a resumed pipeline plans as the one that went on, with what it had learned."""

    def learning() -> tuple[LearnedCosts, Any]:
        costs = LearnedCosts()
        shuffler = TokenShuffler(extensions=[costs, *make_extensions()], equal_rows=False)
        return costs, pipeline_of(name, *make_model(), shuffler)

    (costs, pipeline), batches = learning(), batches_from(0)
    _plans(pipeline, batches, STOP)
    saved = costs.state()
    rest = _plans(pipeline, batches, STEPS - STOP)
    other_costs, other = learning()
    other_costs.load_state(saved)
    again = _plans(other, batches_from(STOP), STEPS - STOP)
    assert rest[:4] == again[:4]  # later ones use times that differ
    assert rest[0].predicted_seconds is not None
