"""Pieces and micro-batches in TorchRec's other pipelines."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from commons.extensions.micro_batches import MicroBatches
from tests.commons.extensions.pieces.drawn_cuts import DrawnCuts
from tests.commons.extensions.pieces.ranking_on_pieces import sharded_model_for_pieces
from tests.commons.histories import TokenShuffler
from tests.commons.pipeline.click_models import shards_of
from tests.commons.pipeline.ranking_pipelines import OTHERS, loaded_histories, pipeline_of, steps_of
from tests.on_ranks import on_ranks


def _trained(name: str, *extensions: Any) -> tuple[list[float], Any, int]:
    """Trains a model; returns the losses of all ranks, its parameters, and the most parts of a step."""
    model, optimizer = sharded_model_for_pieces(0.1)
    shuffler = TokenShuffler(extensions=list(extensions), equal_rows=False)
    pipeline = pipeline_of(name, model, optimizer, shuffler)
    losses, parts = [], 0
    for loss_sum, _, output in steps_of(pipeline, loaded_histories(4)):
        dist.all_reduce(loss_sum)
        losses.append(float(loss_sum))
        parts = max(parts, len(output) if isinstance(output, list) else len(pipeline.plan.destination))
    return losses, shards_of(model), parts


@pytest.mark.parametrize("name", OTHERS)
@on_ranks(2)
def test_a_step_in_parts_learns_what_a_whole_one_learns(name):
    losses, parameters, num_samples = _trained(name)
    for extension, parts_of_whole in ((MicroBatches(40), 1), (DrawnCuts(0), num_samples)):
        got, changed, parts = _trained(name, extension)
        assert got == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(changed, parameters, rtol=1e-4, atol=1e-6)
        assert parts > parts_of_whole
