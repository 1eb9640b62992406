"""A rank without samples runs a copy of a row, which no optimizer may move."""

import copy
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commons.distributed import ShufflePlan
from commons.distributed import loss as module_of_losses
from tests.commons.distributed.internals import RowTable, check_runs_copies
from tests.commons.histories import histories
from tests.commons.pipeline.ranking_pipelines import RankingModel, pipeline_of, sharded, steps_of
from tests.commons.pipeline.runs import Costs
from tests.on_ranks import on_ranks


def check_copies(model: nn.Module, moving: str) -> None:
    """Checks that ranks without samples are refused if `moving` would move a row whose gradient is zero."""
    refused = pytest.raises(ValueError, match=f"whose rows {moving} changes.*such as Adagrad")
    with refused if moving else nullcontext():
        check_runs_copies(_plan_with_an_empty_rank(), False, "sum", model)


def _plan_with_an_empty_rank() -> ShufflePlan:
    ones, loaded = np.ones(2, dtype=np.int64), np.array([2, 0])
    rows = RowTable(loaded, loaded, ones, ones, ones, ones[:, None], ones)
    return ShufflePlan(rows, rows.home, np.array([2, 1]))


@pytest.mark.parametrize(("kind", "moving"), [("ADAM", "the tables' ADAM"), ("EXACT_ROWWISE_ADAGRAD", "")])
def test_fused_optimizers_that_move_rows_without_a_gradient_are_refused(kind, moving):
    tables = nn.Module()
    tables.optimizer = EmbOptimType[kind]  # as FBGEMM's tables have it, which for Adam are for GPUs alone
    check_copies(nn.Sequential(tables), moving)


@pytest.mark.parametrize("mode", ["NONE", "L2", "DECOUPLE"])
def test_a_weight_decay_that_moves_rows_without_a_gradient_is_refused(mode):
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        feature_table_map=[0, 0],  # on CPUs, tables of one feature have no decay
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        weight_decay=0.5,
        weight_decay_mode=WeightDecayMode[mode],
    )
    tables.split_embedding_weights()[0].fill_(1.0)
    (0 * tables(torch.arange(2), torch.arange(3))).sum().backward()
    moves = bool((tables.split_embedding_weights()[0] != 1.0).any())
    assert moves == (mode != "NONE")
    model = nn.Sequential(tables)
    model._lookups = [7, "a name"]  # a user's own
    check_copies(model, "the tables' weight decay" if moves else "")


class Tables(nn.Module):
    """Sums looked-up rows of dicts, which do not know their padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = RankingModel().tables

    def forward(self, batch):
        return self.tables(batch["features"])["item"].values().sum(), None


@pytest.mark.parametrize("name", ["none", "native"])
@on_ranks(2)
def test_pipelines_evaluate_copied_rows_of_any_table_and_train_those_that_stay(name):
    def run(trains: bool) -> int:
        model, optimizer = sharded(Tables())
        pipeline = pipeline_of(name, model.train(trains), optimizer, Costs())
        batches = [histories([1 + step]) for step in range(1 if dist.get_rank() else 3)]
        columns = [{"features": batch.features, "cost": batch.num_tokens()} for batch in batches]
        return len([*steps_of(pipeline, columns)])

    assert run(trains=True) == 3
    # Stands in for tables with Adam, which are for GPUs.
    with mock.patch.object(module_of_losses, "_MOVING", ("EXACT_SGD",)):
        with torch.no_grad():
            assert run(trains=False) == 3
        with pytest.raises(ValueError, match="whose rows the tables' EXACT_SGD changes"):
            run(trains=True)


@on_ranks(2)
def test_evaluation_in_inference_mode_leaves_batches_that_train_afterwards():
    def loaded(rank: int, rows: int = 4) -> dict[str, torch.Tensor]:
        return {"cost": torch.arange(rows), "x": torch.arange(3.0 * rows).view(rows, 3) / 7 + rank}

    torch.manual_seed(0)
    alone = nn.Linear(3, 1)
    model, shuffler, rank = DistributedDataParallel(copy.deepcopy(alone)), Costs(), dist.get_rank()
    with torch.inference_mode():
        model.module(shuffler.shuffle(loaded(rank))["x"])
    batches = [loaded(rank, 1)] * (2 - rank)  # rank 1 trains its second step without a sample
    for step, (batch, plan) in enumerate(shuffler.plan_ahead(batches)):
        model.zero_grad()
        squares = model(shuffler.exchange(batch, plan)["x"]).squeeze(1) ** 2
        shuffler.scale(squares, plan, "sum").backward()
        alone.zero_grad()
        (alone(torch.cat([loaded(of, 1)["x"] for of in range(2 - step)])) ** 2).mean().backward()
        got, expected = model.module.bias.grad, alone.bias.grad
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
