"""Channels: numbers and objects that ranks gather, apart from all other messages of their group."""

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.internals import RankGroup
from tests.on_ranks import on_ranks


def _sent_to_all_ranks() -> None:
    channel, rank = RankGroup.of().channel(), dist.get_rank()
    ranks = range(channel.num_ranks)
    for size in (1, 5, 1000):
        rows = np.arange(size, dtype=np.int64) + 100 * np.arange(channel.num_ranks)[:, None]
        assert np.array_equal(channel.all_gather(rows[rank]), rows)
        assert channel.all_gather_objects("x" * (rank * size)) == ["x" * (of * size) for of in ranks]
        numbers = channel.all_gather_objects(torch.full((rank * size,), rank))
        assert [of_rank.tolist() for of_rank in numbers] == [[rank] * (rank * size) for rank in ranks]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_rank_gets_what_each_gave(pools, num_ranks):
    pools(num_ranks).run(_sent_to_all_ranks)


@on_ranks(3)
def test_an_object_that_does_not_pickle_fails_on_every_rank_and_leaves_the_channel_usable():
    channel, rank = RankGroup.of().channel(), dist.get_rank()
    error = error_of(channel.all_gather_objects, threading.Lock() if rank == 1 else rank)
    assert error.startswith("TypeError: cannot pickle '_thread.lock' object")
    assert channel.all_gather_objects(rank) == [0, 1, 2]


@on_ranks(3)
def test_threads_share_a_group_in_any_order():
    group = RankGroup.of()
    channels = [group.channel() for _ in range(3)]
    rank, wrong = dist.get_rank(), []

    def gather(number: int) -> None:
        pause = threading.Event()
        for turn in range(60):
            pause.wait(0.001 * ((turn * (rank + 1) + number) % 3))
            mine = np.full(1 + 300 * number, 1000 * turn + 10 * number + rank)
            expected = mine - rank + np.arange(channels[number].num_ranks)[:, None]
            if not np.array_equal(channels[number].all_gather(mine), expected):
                wrong.append(f"channel {number}, turn {turn}")

    threads = [threading.Thread(target=gather, args=(number,)) for number in range(len(channels))]
    for thread in threads:
        thread.start()
    for turn in range(60):
        total = torch.tensor(turn + rank)
        dist.all_reduce(total, group=group.control)
        if int(total) != 3 * turn + 3:
            wrong.append(f"collective, turn {turn}")
    for thread in threads:
        thread.join()
    assert wrong == []


@on_ranks(2)
def test_ranks_agree_on_a_channel_although_one_has_counted_more():
    group = RankGroup.of()
    group._last_tag += 3 * dist.get_rank()  # as if rank 1 alone had made others
    made = [group.channel() for _ in range(2)]
    tags = made[1].all_gather(np.array([channel.tag for channel in made]))
    assert tags[0].tolist() == tags[1].tolist() and len(set(tags[0])) == 2
