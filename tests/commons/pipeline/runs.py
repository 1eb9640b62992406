"""Steps of pipelines under any settings of a shuffler: evaluation, and times of computing."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commons.distributed import IdentityShuffler
from tests.commons.distributed.shufflers import FieldShuffler
from tests.commons.histories import histories
from tests.commons.perf_model.internals import ComputeClock
from tests.commons.pipeline.ranking_pipelines import CPU, RankingModel, pipeline_of, sharded, steps_of

SAMPLES, BATCH_SIZE = 257, 32


class Costs(FieldShuffler):
    def get_workloads(self, batch):
        return batch["cost"]

    get_tokens = get_workloads


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        squares = self.weight * batch["number"] ** 2
        return squares, squares.detach()


def summed_outputs(settings: dict[str, Any]) -> list[float]:
    """Returns how many outputs samples have on all ranks, and the sums of these and of losses."""
    numbers = torch.arange(1, SAMPLES + 1, dtype=torch.float64).tensor_split(dist.get_world_size())
    steps = numbers[dist.get_rank()].split(BATCH_SIZE)
    batches = [{"number": of_step, "cost": torch.ones_like(of_step).long()} for of_step in steps]
    model = Squares()
    shuffler = Costs(**settings)
    pipeline = pipeline_of("none", model, None, shuffler)
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for loss_sum, _, output in steps_of(pipeline, batches):
            if isinstance(output, list):
                output = shuffler.extensions[0].join_values(output, pipeline.plan)
            of_samples = output[: pipeline.num_samples]
            totals += torch.tensor([len(of_samples), of_samples.sum(), loss_sum])
    dist.all_reduce(totals)
    assert model.weight.grad is None
    return totals.tolist()


def check_summed(results: list[list[float]]) -> None:
    """Checks that every rank has the outputs and losses of all samples."""
    squares = sum(number**2 for number in range(1, SAMPLES + 1))
    assert results == [[SAMPLES, squares, squares]] * len(results)


NAP_S = 0.2


class _Nap(nn.Module):
    """Passes tensors on; on rank 1 it sleeps in forward and in backward."""

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or dist.get_rank() == 0:
            return tensor
        time.sleep(NAP_S)
        tensor = tensor.clone()
        tensor.register_hook(lambda gradient: time.sleep(NAP_S))
        return tensor


def _model(sharded_tables: bool) -> tuple[nn.Module, Any]:
    model = RankingModel()
    model.dense.head = nn.Sequential(model.dense.head, _Nap())
    if sharded_tables:
        return sharded(model)
    return nn.parallel.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.01)


def spans(
    pipeline_name: str, sharded_tables: bool, settings: dict[str, Any]
) -> tuple[list[int], list[float]]:
    """Returns how often the model is called in each of two steps, and the span of each."""
    model, optimizer = _model(sharded_tables)
    shuffler = IdentityShuffler(**settings)
    pipeline = pipeline_of(pipeline_name, model, optimizer, shuffler)
    clock = ComputeClock(model, CPU)
    batch = histories([9] * 4)  # 19 tokens a sample
    loader = iter([batch, batch])
    of_steps, calls = [], []
    for _ in range(2):
        span = clock.begin()
        outputs = pipeline.progress(loader)
        calls.append(len(outputs) if isinstance(outputs, list) else 1)
        of_steps.append(span.seconds())
    with pytest.raises(StopIteration):
        pipeline.progress(loader)
    span = clock.begin()
    model.eval()
    with torch.no_grad():
        pipeline.progress(iter([batch]))
    assert span.end is None and span.seconds() == 0
    pipeline.reset()
    return calls, of_steps


def check_spans(results: list[tuple[list[int], list[float]]], num_calls: int) -> None:
    """Checks that rank 1 computes for longer, and that rank 0 does not while it waits."""
    (calls, fast), (_, slow) = results
    assert calls == [num_calls] * 2
    # Not the first: it has one-off costs, and DistributedDataParallel may reduce in its backward.
    naps = 2 * num_calls * NAP_S  # each call naps twice
    assert fast[1] < naps / 2 and naps < slow[1]
