"""A rank without samples runs a copy of a row, which no optimizer may move."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
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
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from commons.distributed import empty_rank
from tests.commons.distributed.internals import check_runs_copies
from tests.commons.histories import histories
from tests.commons.pipeline.ranking_pipelines import RankingModel, pipeline_of, sharded, steps_of
from tests.commons.pipeline.runs import Costs
from tests.on_ranks import on_ranks

Optimizers = Callable[[list[nn.Parameter]], Any]
sparse_adam = partial(torch.optim.SparseAdam, lr=0.1)


def held_as(hold: Callable[[Any, Any], Any]) -> Optimizers:
    """Returns what makes an optimizer that holds an SGD and a SparseAdam, and that knows itself."""

    def make(parameters: list[nn.Parameter]) -> Any:
        held = hold(torch.optim.SGD(parameters, lr=0.1), sparse_adam(parameters))
        container = SimpleNamespace(optimizers=held)
        container.optimizer = container
        return container

    return make


def keyed(parameters: list[nn.Parameter]) -> CombinedOptimizer:
    named = {str(number): parameter for number, parameter in enumerate(parameters)}
    return CombinedOptimizer([("tables", KeyedOptimizerWrapper(named, sparse_adam))])


def fused(kind: str) -> nn.Module:
    """Returns tables with an optimizer as FBGEMM's have it, whose tables for Adam are for GPUs alone."""
    tables = nn.Module()
    tables.optimizer = EmbOptimType[kind]
    return nn.Sequential(tables)


# How a model or an optimizer is made, and what would move a row whose gradient is zero; "" is nothing.
OPTIMIZERS: dict[str, tuple[Optimizers, str]] = {
    "SparseAdam": (sparse_adam, "SparseAdam"),
    "a list": (held_as(lambda sgd, adam: [sgd, adam]), "SparseAdam"),
    "a dict": (held_as(lambda sgd, adam: {"a": sgd, "b": adam}), "SparseAdam"),
    "pairs": (held_as(lambda sgd, adam: [("a", sgd), ("b", adam)]), "SparseAdam"),
    "a method": (held_as(lambda sgd, adam: lambda: [sgd, adam]), ""),
    "ZeroRedundancyOptimizer": (
        lambda parameters: ZeroRedundancyOptimizer(parameters, torch.optim.SparseAdam, lr=0.1),
        "SparseAdam",
    ),
    "TorchRec's": (keyed, "SparseAdam"),
    "SGD": (partial(torch.optim.SGD, lr=0.1), ""),
}


def check_placed(num_placed: list[int], model: Any, optimizer: Any, moving: str) -> None:
    refused = pytest.raises(ValueError, match=f"whose rows {moving} changes.*such as Adagrad")
    with refused if moving else nullcontext():
        check_runs_copies(np.array(num_placed), False, "sum", model, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1)
def test_a_sparse_adam_is_found_in_every_container_of_optimizers(name):
    make, moving = OPTIMIZERS[name]
    optimizer = make([nn.Parameter(torch.zeros(2))])
    check_placed([2, 0], None, optimizer, moving)
    check_placed([1, 1], None, optimizer, "")


@pytest.mark.parametrize(("kind", "moving"), [("ADAM", "the tables' ADAM"), ("EXACT_ROWWISE_ADAGRAD", "")])
def test_fused_optimizers_that_move_rows_without_a_gradient_are_refused(kind, moving):
    check_placed([2, 0], fused(kind), None, moving)


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
    check_placed([2, 0], model, None, "the tables' weight decay" if moves else "")


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
    with mock.patch.object(empty_rank, "_MOVING", ("EXACT_SGD",)):
        with torch.no_grad():
            assert run(trains=False) == 3
        with pytest.raises(ValueError, match="whose rows the tables' EXACT_SGD changes"):
            run(trains=True)


class SparseRows(nn.Module):
    """Looks up a table whose gradient has only the rows that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2, sparse=True)

    def forward(self, batch):
        return (self.table(batch["id"]) ** 2).sum(1), None


@on_ranks(2)
def test_a_pipeline_with_sparse_adam_trains_until_a_rank_has_no_sample():
    model = DistributedDataParallel(SparseRows())
    table = model.module.table.weight
    before, moved = table.detach().clone(), []
    pipeline = pipeline_of("none", model, keyed([*model.parameters()]), Costs())
    ids_of_rank = [[torch.tensor([1, 2]), torch.tensor([5])], [torch.tensor([3, 4])]][dist.get_rank()]
    batches = [{"id": ids, "cost": torch.ones_like(ids)} for ids in ids_of_rank]
    with pytest.raises(ValueError, match="whose rows SparseAdam changes"):
        for _ in steps_of(pipeline, batches):
            moved.append((table != before).any(1).nonzero().flatten().tolist())
    assert moved == [[1, 2, 3, 4]]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


@on_ranks(2)
def test_evaluation_in_inference_mode_leaves_batches_that_train_afterwards():
    def loaded(rank: int, rows: int = 4) -> dict[str, torch.Tensor]:
        return {"cost": torch.arange(rows), "x": torch.arange(3.0 * rows).view(rows, 3) / 7 + rank}

    model, shuffler, rank = DistributedDataParallel(linear()), Costs(), dist.get_rank()
    with torch.inference_mode():
        model.module(shuffler.shuffle(loaded(rank))["x"])
    batches = [loaded(rank, 1)] * (2 - rank)  # rank 1 trains its second step without a sample
    for step, (batch, plan) in enumerate(shuffler.plan_ahead(batches)):
        model.zero_grad()
        squares = model(shuffler.exchange(batch, plan)["x"]).squeeze(1) ** 2
        shuffler.scale(squares, plan, "sum").backward()
        alone = linear()
        (alone(torch.cat([loaded(of, 1)["x"] for of in range(2 - step)])) ** 2).mean().backward()
        got, expected = model.module.bias.grad, alone.bias.grad
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
