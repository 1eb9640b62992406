"""Channels gather what every rank gives, whatever other threads do over the same group."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed.rank_group import RankGroup
from tests.on_ranks import on_ranks


def _rows_and_objects(sizes: list[int]) -> list:
    channel = RankGroup.of().channel()
    rank = dist.get_rank()
    rows = [channel.all_gather(np.arange(size, dtype=np.int64) + 100 * rank) for size in sizes]
    values = [channel.all_gather_objects("x" * (rank * size)) for size in sizes]
    return [[row.tolist() for row in rows], values]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_rank_gets_what_each_gave(pools, num_ranks):
    sizes = [1, 5, 1000]
    rows = [[[n + 100 * rank for n in range(size)] for rank in range(num_ranks)] for size in sizes]
    values = [["x" * (rank * size) for rank in range(num_ranks)] for size in sizes]
    assert pools(num_ranks).run(_rows_and_objects, sizes) == [[rows, values]] * num_ranks


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


def _channels_after_a_failure() -> list[int]:
    """Returns the tags of a channel made after rank 1 alone had made others."""
    group = RankGroup.of()
    if dist.get_rank() == 1:
        for _ in range(3):
            next(group._tags)
    return [group.channel().tag for _ in range(2)]


def test_ranks_agree_on_a_channel_although_one_has_counted_more(pools):
    first, second = pools(2).run(_channels_after_a_failure)
    assert first == second and len(set(first)) == 2
