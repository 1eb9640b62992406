"""Ranks that divide other samples, and epochs in the order of the first, are warned of."""

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.bucket_sampler import BucketSampler
from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.on_ranks import on_ranks

COSTS = np.arange(1, 41)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (lambda rank: {}, ""),
        (lambda rank: {"seed": rank}, "seed=1"),
        (lambda rank: {"workloads": COSTS + rank}, "hash"),
        (lambda rank: {"workloads": COSTS[rank:]}, "39 samples"),
    ],
    ids=["equal", "seed", "costs", "number"],
)
def test_ranks_that_divide_other_samples_are_warned_of_without_waiting(pools, more, text):
    told = pools(2).run(_warnings, [more(rank) for rank in range(2)])
    assert sorted(map(len, told)) == [0, bool(text)]
    assert all(text in line and "another rank one of" in line for of_rank in told for line in of_rank)


def _warnings(settings):
    with warnings_of("commons.epoch_start") as told:
        rank = dist.get_rank()
        BucketSampler(**{"workloads": COSTS, "batch_size": 2, "rank": rank, "num_ranks": 2} | settings[rank])
    return list(told)


@pytest.mark.parametrize("num_workers", [0, 2])
@on_ranks(1)
def test_a_second_epoch_in_the_order_of_the_first_is_warned_of(num_workers):
    for sets in (True, False):
        sampler = BucketSampler(COSTS, 4)
        loader = DataLoader(COSTS, batch_sampler=sampler, num_workers=num_workers)
        with warnings_of("commons.epoch_start") as told:
            for epoch in range(3):
                if sets:
                    sampler.set_epoch(epoch)
                assert sum(len(batch) for batch in loader) == len(COSTS)
        assert all("set_epoch of a BucketSampler that shuffles was never called" in line for line in told)
        assert len(told) <= (not sets)
