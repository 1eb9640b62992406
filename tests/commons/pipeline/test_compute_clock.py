"""What a rank computes is told from what it waits for."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from commons.distributed import BatchShufflerFactory
from commons.pipeline import TrainPipelineFactory
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, shard_model
from tests.commons.pipeline.test_whole_epochs import _batch
from tests.hstu.hstu_samples import VOCABULARY, ranking_model

NAP_S = 0.3


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


def _spans(pipeline_name: str, sharded_tables: bool, cap: int | None) -> tuple[int, list[float], int]:
    """Micro-batches and span of each of three steps, and hooks that are left when the pipeline has gone."""
    model, optimizer = shard_model(
        _model(sharded_tables), OptimizerArgs("sgd", 0.01), device := torch.device("cpu")
    )
    shuffler = BatchShufflerFactory.create(
        "identity", get_workloads=lambda batch: batch.num_tokens(), max_tokens_per_micro_batch=cap
    )
    pipeline = TrainPipelineFactory.create(
        pipeline_name,
        model=model,
        optimizer=optimizer,
        device=device,
        batch_shuffler=shuffler,
        loss_reduction="sum",
    )
    assert pipeline.compute_span is None
    rng = np.random.default_rng(dist.get_rank())
    loader = iter([_batch(rng, 4) for _ in range(3)])
    spans, micro_batches = [], []
    for _ in range(3):
        outputs = pipeline.progress(loader)[2]
        micro_batches.append(len(outputs) if cap else 1)
        spans.append(pipeline.compute_span.seconds())
    with pytest.raises(StopIteration):
        pipeline.progress(loader)
    model.eval()
    with torch.no_grad():
        pipeline.progress(iter([_batch(rng, 4)]))
    assert pipeline.compute_span is None
    pipeline.reset()
    del pipeline
    gc.collect()
    return micro_batches, spans, len(model._forward_hooks) + len(model._forward_pre_hooks)


@pytest.mark.parametrize(
    ("pipeline_name", "sharded_tables", "cap"),
    [("native", True, None), ("none", True, 40), ("none", False, None), ("none", False, 40)],
)
def test_a_slow_rank_computes_and_the_others_wait(pools, pipeline_name, sharded_tables, cap):
    fast, slow = pools(2).run(_spans, pipeline_name, sharded_tables, cap)
    assert fast[0] == slow[0] and (cap is None or max(fast[0]) > 1)
    for number, (micro_batches, of_fast, of_slow) in enumerate(zip(fast[0], fast[1], slow[1], strict=True)):
        if number == 0:
            continue  # it has one-off costs, and DistributedDataParallel may reduce in its first backward
        naps = 2 * micro_batches * NAP_S  # each micro-batch naps twice
        assert of_fast < naps / 2 and naps < of_slow
    assert fast[2] == slow[2] == 0
