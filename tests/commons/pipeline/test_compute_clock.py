"""The time a rank computes, as opposed to the time it waits."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commons.distributed import BatchShufflerFactory
from commons.pipeline import TrainPipelineFactory
from commons.perf_model.compute_clock import ComputeClock
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model
from tests.hstu.hstu_samples import VOCABULARY, Sample, hstu_batch, ranking_model

NAP_S = 0.2
CPU = torch.device("cpu")


class _Nap(nn.Module):
    """Passes tensors on; on rank 1 it sleeps in forward and in backward."""

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or dist.get_rank() == 0:
            return tensor
        time.sleep(NAP_S)
        tensor = tensor.clone()
        tensor.register_hook(lambda gradient: time.sleep(NAP_S))
        return tensor


class _ReplicatedTables(nn.Module):
    """Losses of a table that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.nap = _Nap()

    def forward(self, batch: BaseBatch) -> tuple[torch.Tensor, None]:
        return self.nap(self.table(batch.features["item"].values())).sum(1), None


def _model(sharded_tables: bool) -> nn.Module:
    if not sharded_tables:
        return _ReplicatedTables()
    model = ranking_model()
    model.dense.head = nn.Sequential(model.dense.head, _Nap())
    return model


def _spans(pipeline_name: str, sharded_tables: bool, cap: int | None) -> tuple[list[int], list[float]]:
    """The micro-batches and the span of each of two steps."""
    model, optimizer = shard_model(_model(sharded_tables), OptimizerArgs("sgd", 0.01), CPU)
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=model,
        optimizer=optimizer,
        device=CPU,
        batch_shuffler=BatchShufflerFactory.create(
            "identity", get_workloads=lambda batch: batch.num_tokens(), max_tokens_per_micro_batch=cap
        ),
        loss_reduction="sum",
    )
    clock = ComputeClock(model, CPU)
    assert clock.span() is None
    items = list(range(9))
    batch = hstu_batch([Sample([3], [], items, [0] * 9, 0, [0] * 9)] * 4)  # 19 tokens a sample
    loader = iter([batch, batch])
    spans, micro_batches = [], []
    for _ in range(2):
        clock.begin()
        outputs = pipeline.progress(loader)[2]
        micro_batches.append(len(outputs) if cap else 1)
        spans.append(clock.span().seconds())
    with pytest.raises(StopIteration):
        pipeline.progress(loader)
    clock.begin()
    model.eval()
    with torch.no_grad():
        pipeline.progress(iter([batch]))
    assert clock.span() is None
    pipeline.reset()
    return micro_batches, spans


@pytest.mark.parametrize(
    ("pipeline_name", "sharded_tables", "cap"),
    [("native", True, None), ("none", True, 40), ("none", False, None), ("none", False, 40)],
)
def test_a_slow_rank_computes_and_the_others_wait(pools, pipeline_name, sharded_tables, cap):
    (micro_batches, fast), (_, slow) = pools(2).run(_spans, pipeline_name, sharded_tables, cap)
    assert micro_batches == [1 if cap is None else 2] * 2
    # Not the first: it has one-off costs, and DistributedDataParallel may reduce in its backward.
    naps = 2 * micro_batches[1] * NAP_S  # each micro-batch naps twice
    assert fast[1] < naps / 2 and naps < slow[1]
