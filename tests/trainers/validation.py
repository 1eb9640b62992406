"""Validates within an epoch through a second pipeline; unpacks outputs and slices batches as torchrec_dlrm.

"# balancing" marks the statements that switch the stage on, "# before:" the code they replace."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec.datasets.utils import Batch

# before: from torchrec.distributed import TrainPipelineSparseDist
from workload_balancer.distributed import BatchShuffler  # balancing
from workload_balancer.pipeline import SparseDistTrainPipeline  # balancing

from tests.trainers.clicks import ClickModel, Row, collate, draw, shard, sum_loss  # noqa: F401

VALIDATION_FREQ, LIMIT_VAL_BATCHES = 2, 2
VALIDATED = slice(32, 48)  # of each rank's data


class ClickShuffler(BatchShuffler):  # balancing
    def get_workloads(self, batch: Batch) -> torch.Tensor:
        return batch.sparse_features["viewed"].lengths() ** 2


def evaluate(pipeline: Any, dataloader: Iterable[Batch]) -> torch.Tensor:
    pipeline._model.eval()
    iterator = itertools.islice(iter(dataloader), LIMIT_VAL_BATCHES)
    sums = torch.zeros(2, device=pipeline._device)  # of losses and rows
    with torch.no_grad():
        while True:
            try:
                _loss, logits, labels = pipeline.progress(iterator)
                sums += torch.stack([sum_loss(logits, labels), torch.tensor(float(len(logits)))])
            except StopIteration:
                break
    dist.all_reduce(sums)
    return sums[0] / sums[1]


def train(data: list[Row], device: torch.device) -> tuple[torch.Tensor, torch.nn.Module]:
    model, optimizer = shard(ClickModel(), device)
    # before: train_pipeline = TrainPipelineSparseDist(model, optimizer, device)
    train_pipeline = SparseDistTrainPipeline(model, optimizer, device, ClickShuffler(), "mean")  # balancing
    # before: val_pipeline = TrainPipelineSparseDist(model, optimizer, device)
    val_pipeline = SparseDistTrainPipeline(model, optimizer, device, ClickShuffler(), "mean")  # balancing
    dataloader = DataLoader(data, batch_size=8, collate_fn=collate)
    val_dataloader = DataLoader(data[VALIDATED], batch_size=8, collate_fn=collate)
    iterator, validated = iter(dataloader), []
    train_pipeline._model.train()
    for it in itertools.count(1):
        try:
            train_pipeline.progress(iterator)
            if it % VALIDATION_FREQ == 0:
                validated.append(evaluate(val_pipeline, val_dataloader))
                train_pipeline._model.train()
        except StopIteration:
            break
    return torch.stack(validated), model
