"""Interfaces that other trainers rely on; `tests/examples` checks that the same programs learn the same."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from commons.pipeline import TrainPipelineFactory
from tests.examples.programs import BATCH_SIZE, MARK, load, rows_of, source, trained_alone
from tests.on_ranks import on_ranks

CPU = torch.device("cpu")


@on_ranks(2)
def test_a_batch_keeps_the_bookkeeping_of_its_own_ranks_loader():
    module, rank = load("loader_bookkeeping"), dist.get_rank()
    data = rows_of("loader_bookkeeping", [BATCH_SIZE, 1], 3)[rank]
    _, model = module.train(data, CPU)
    loaded = [batch.checkpoint_info for batch in DataLoader(data, BATCH_SIZE, collate_fn=module.collate)]
    assert model.positions == loaded


@pytest.mark.parametrize("drops", [True, False])
@on_ranks(2)
def test_a_subclass_decides_when_data_ends(drops):
    module, data = load("derived_pipeline"), rows_of("derived_pipeline", [5, 0], 4)
    module.DROPS_REMAINDER = drops
    losses, _ = module.train(data[dist.get_rank()], CPU)
    expected, _ = trained_alone("derived_pipeline", data)
    assert losses.tolist() == pytest.approx(expected[: 3 if drops else 4], rel=1e-5)


class SamplesModel(torch.nn.Module):
    """Returns what a pipeline expects."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, samples):
        assert torch.equal(
            samples.merged.values(),
            KeyedJaggedTensor.concat([samples.history, samples.candidates]).values(),
        )
        losses, scores = self.model(samples.history, samples.candidates, samples.labels)
        return losses["click"], scores


@on_ranks(2)
def test_a_pipeline_takes_batches_that_move_in_place():
    module = load("stream_loop")
    data = rows_of("stream_loop", [5, 2], 3)
    model, optimizer = module.shard(module.StreamModel(), CPU)
    pipeline = TrainPipelineFactory.create(
        "none",
        model=SamplesModel(model),
        optimizer=optimizer,
        device=CPU,
        batch_shuffler=module.SamplesShuffler(),
        loss_reduction="mean",
    )
    batches = iter(DataLoader(data[dist.get_rank()], BATCH_SIZE, collate_fn=module.collate))
    losses = []
    for _ in range(3):
        pipeline.progress(batches)
        dist.all_reduce(pipeline.loss_sum)
        losses.append(float(pipeline.loss_sum) / pipeline.loss_tokens)
    assert losses == pytest.approx(trained_alone("stream_loop", data)[0], rel=1e-5)


@pytest.mark.parametrize("name", ["pooled_dlrm", "loader_bookkeeping", "derived_pipeline"])
def test_only_constructors_change(name):
    """Apart from imports and classes: no loop changes, and outputs only lose a copied row.

    A program may also ask for one traceback.
    """
    lines = [line for line in source(name).splitlines() if line.startswith(" ")]
    marked = [line for line in lines if line.endswith(MARK) or "# before: " in line]
    assert marked and all(
        re.match(
            r"    ((# before: )?\w*pipeline = |show_first_cause_only\(\)| +clicked = clicked\[: pipeline)",
            line,
        )
        for line in marked
    )
