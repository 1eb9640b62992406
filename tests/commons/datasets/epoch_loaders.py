"""Both divisions of an epoch among ranks and batches, over samples that are their numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from commons.bucket_sampler import BucketSampler
from commons.datasets import SequenceDataset

Batches = list[list[int]]


class Numbers:
    """Samples are numbers, and a batch is a tensor of them."""

    def __init__(self, count: int = 32) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, samples: list[int], batch_size: int) -> torch.Tensor:
        return torch.tensor(samples, dtype=torch.int64)


def sequences(
    count: int = 32, batch_size: int = 4, rank: int = 0, num_ranks: int = 1, **options: Any
) -> SequenceDataset:
    return SequenceDataset(Numbers(count), batch_size, rank, num_ranks, **{"shuffle": True} | options)


def buckets(
    count: int = 32, batch_size: int = 4, rank: int = 0, num_ranks: int = 1, **options: Any
) -> BucketSampler:
    options = {"workloads": histories(count), **options}
    return BucketSampler(options.pop("workloads"), batch_size, rank, num_ranks, **options)


Make = Callable[..., SequenceDataset | BucketSampler]
MAKERS: dict[str, Make] = {"sequences": sequences, "buckets": buckets}


def histories(count: int) -> np.ndarray:
    return np.random.default_rng(0).lognormal(5, 1.2, count)


def loader_of(division: SequenceDataset | BucketSampler, count: int = 32, **options: Any) -> DataLoader:
    if isinstance(division, SequenceDataset):
        return DataLoader(division, batch_size=None, sampler=division.sampler, **options)
    return DataLoader(range(count), batch_sampler=division, **options)


def loaded(loader: Any) -> Batches:
    return [list(map(int, batch)) for batch in loader]


def expected(make: Make, epoch: int, start: int) -> Batches:
    """Returns the batches of an epoch that was set explicitly."""
    division = make()
    division.set_epoch(epoch, start)
    return loaded(division)


def steps_of(
    make: Make, count: int, batch_size: int, num_ranks: int, epoch: int = 0, start: int = 0, **options: Any
) -> list[tuple[list[int], ...]]:
    """Returns the ranks' batches of each step, after a check that all have as many as they say."""
    by_rank = []
    for rank in range(num_ranks):
        division = make(count, batch_size, rank, num_ranks, **options)
        division.set_epoch(epoch, start)
        by_rank.append(loaded(division))
        assert len(by_rank[-1]) == len(division)
    return list(zip(*by_rank, strict=True))


def samples_of(step: tuple[list[int], ...]) -> list[int]:
    return sorted(sample for batch in step for sample in batch)
