"""A pipeline with its own backward and end of data, over an optimizer that accumulates, as TorchEasyRec's.

"# balancing" marks the statements that switch the stage on, "# before:" the code they replace."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from workload_balancer.distributed import BatchShuffler  # balancing
from workload_balancer.pipeline import ShuffleStageMixin  # balancing

from tests.trainers.clicks import ClickModel, Row, collate, draw, shard  # noqa: F401

DROPS_REMAINDER = True
ACCUMULATED = 2  # batches per update of the dense part


class AccumulatingOptimizer:
    """Updates parameters at every second call, and only then forgets their gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._calls = optimizer, 0

    def zero_grad(self) -> None:
        if self._calls % ACCUMULATED == 0:
            self._optimizer.zero_grad()

    def step(self) -> None:
        self._calls += 1
        if self._calls % ACCUMULATED == 0:
            self._optimizer.step()


class Pipeline(TrainPipelineSparseDist):
    def __init__(self, *arguments: Any, check_all_workers_data_status: bool = False, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._checks_all = check_all_workers_data_status

    def _next_batch(self, dataloader_iter: Iterator[Any]) -> Any | None:
        if dataloader_iter is not self._dataloader_iter:
            self._dataloader_iter, self._dataloader_exhausted = dataloader_iter, False
        if self._dataloader_exhausted:
            return None
        batch = next(dataloader_iter, None)
        has_batch = torch.tensor(float(batch is not None))
        if self._checks_all:
            dist.all_reduce(has_batch, dist.ReduceOp.PRODUCT)
        if not has_batch:  # drops the batches of ranks that still have one
            self._dataloader_exhausted, batch = True, None
        return batch

    def _backward(self, losses: torch.Tensor) -> None:
        (losses.sum() / ACCUMULATED).backward()


class Balanced(ShuffleStageMixin, Pipeline):  # balancing
    pass


class ClickShuffler(BatchShuffler):  # balancing
    def get_workloads(self, batch: Batch) -> torch.Tensor:
        return batch.sparse_features["viewed"].lengths() ** 2


def train(data: list[Row], device: torch.device) -> tuple[torch.Tensor, torch.nn.Module]:
    model, optimizer = shard(ClickModel(), device)
    optimizer = AccumulatingOptimizer(optimizer)
    named = {"check_all_workers_data_status": DROPS_REMAINDER}
    # before: pipeline = Pipeline(model, optimizer, device, **named)
    pipeline = Balanced(model, optimizer, device, ClickShuffler(), "mean", **named)  # balancing
    batches, losses = iter(DataLoader(data, batch_size=8, collate_fn=collate)), []
    while True:
        try:
            loss, _, clicked = pipeline.progress(batches)
        except StopIteration:
            break
        losses.append(torch.stack([loss * len(clicked), torch.tensor(len(clicked))]))
    sums = torch.stack(losses)
    dist.all_reduce(sums)
    return sums[:, 0] / sums[:, 1], model
