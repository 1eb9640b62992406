"""The stage in front of a pipeline that somebody else derived from TorchRec's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from commons.pipeline import ShuffleStageMixin, SparseDistTrainPipeline
from tests.commons.histories import TokenShuffler, draw_histories, histories
from tests.commons.pipeline.ranking_pipelines import CPU, sharded_ranking_model, steps_of
from tests.on_ranks import on_ranks

LOSS_SCALE = 8.0


class Derived(TrainPipelineSparseDist):
    """Scales losses in backward, leaves out batches of one row, and ends with the first loader."""

    def __init__(self, *arguments: Any, drops_remainder: bool = False, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._drops_remainder = drops_remainder
        self.loaded = 0

    def _next_batch(self, dataloader_iter: Iterator[Any]) -> Any | None:
        batch = super()._next_batch(dataloader_iter)
        while batch is not None and batch.batch_size == 1:
            batch = super()._next_batch(dataloader_iter)
        if self._drops_remainder:
            has_batch = torch.tensor(float(batch is not None))
            dist.all_reduce(has_batch)
            batch = batch if has_batch == dist.get_world_size() else None
        self.loaded += batch is not None
        return batch

    def _backward(self, losses: torch.Tensor) -> None:
        (losses * LOSS_SCALE).sum().backward()


class Balanced(ShuffleStageMixin, Derived):
    pass


def _train(make: Any, learning_rate: float, batches: list[Any], **named: Any) -> tuple[Any, list[Any]]:
    model, optimizer = sharded_ranking_model(learning_rate)
    pipeline = make(model, optimizer, CPU, batch_shuffler=TokenShuffler(), loss_reduction="sum", **named)
    steps = []
    for loss_sum, loss_tokens, _ in steps_of(pipeline, batches):
        dist.all_reduce(loss_sum)
        steps.append((float(loss_sum) / loss_tokens, pipeline.report.imbalance_after))
    return pipeline, steps


@on_ranks(2)
def test_backward_and_next_batch_of_the_subclass_run():
    rng = np.random.default_rng(dist.get_rank())
    batches = [draw_histories(rng, 6) for _ in range(4)]
    single = [batches[0], histories([3]), *batches[1:], histories([3])]
    theirs, balanced = _train(Balanced, 0.01, single)
    _, expected = _train(SparseDistTrainPipeline, 0.01 * LOSS_SCALE, batches)
    np.testing.assert_allclose(balanced, expected, rtol=1e-6)
    assert theirs.loaded == len(batches)


@pytest.mark.parametrize("drops", [True, False])
@on_ranks(2)
def test_the_subclass_decides_when_data_ends(drops):
    batches = [histories([n, 1]) for n in range(2, 5 + dist.get_rank())]
    _, steps = _train(Balanced, 0.01, batches, drops_remainder=drops)
    assert len(steps) == (3 if drops else 4)
