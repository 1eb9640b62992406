"""The stage without any speed: what a step computes, on a page. Tests compare the fast one with it.

For example, one rank loads histories of 9 and 8 items, and another loads two of 1 item. Karmarkar and Karp's
method gives each rank a long one and a short one. The gradient is that of the mean over all four's labels.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.partition import karmarkar_karp
from tests.commons.histories import HistoryBatch

Sample = dict[str, torch.Tensor]  # its values by key


def balanced(batch: HistoryBatch, workloads: torch.Tensor) -> tuple[list[Sample], int]:
    """Returns the samples that this rank computes, and the number of all ranks' labels. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loaded: list[Any] = [None] * ranks
    dist.all_gather_object(loaded, (samples_of(batch), workloads[: batch.num_samples].tolist()))
    samples = [sample for of_rank, _ in loaded for sample in of_rank]
    costs = np.array([cost for _, of_rank in loaded for cost in of_rank])
    mine = np.sort(karmarkar_karp(costs, ranks)[rank])
    return [samples[number] for number in mine], sum(len(sample["label"]) for sample in samples)


def step(model: torch.nn.Module, optimizer: Any, batch: HistoryBatch, workloads: torch.Tensor) -> float:
    """Trains on the samples of all ranks; returns the mean of their losses. Collective."""
    mine, num_labels = balanced(batch, workloads)
    optimizer.zero_grad()
    loss = model(batch_of(mine))[0].sum()
    (loss * dist.get_world_size() / num_labels).backward()  # the mean over ranks divides by their number
    optimizer.step()
    dist.all_reduce(total := loss.detach())
    return float(total) / num_labels


def samples_of(batch: HistoryBatch) -> list[Sample]:
    columns = {
        name: column.to_dense()
        for of in (batch.features, batch.labels)
        for name, column in of.to_dict().items()
    }
    return [{name: column[row] for name, column in columns.items()} for row in range(batch.num_samples)]


def batch_of(samples: list[Sample]) -> HistoryBatch:
    columns = {name: JaggedTensor.from_dense([sample[name] for sample in samples]) for name in samples[0]}
    labels = KeyedJaggedTensor.from_jt_dict({"label": columns.pop("label")})
    return HistoryBatch(KeyedJaggedTensor.from_jt_dict(columns), len(samples), {}, ["user"], labels)
