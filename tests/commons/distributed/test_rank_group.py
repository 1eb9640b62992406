"""Process groups that shufflers share, their timeout, groups of some ranks, and channels over them."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShuffler, rank_group
from commons.distributed.rank_group import RankGroup
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.loaded_batches import lopsided_batch
from tests.commons.distributed.shufflers import FieldShuffler
from tests.on_ranks import on_ranks
from tests.process_pool import ProcessPool, free_port


def _sum_over(group: dist.ProcessGroup | None) -> int:
    rank = torch.tensor(dist.get_rank())
    dist.all_reduce(rank, group=group)
    return int(rank)


def _sums(made: RankGroup) -> list[int]:
    """Returns what the ranks of a group exchange, if they are several, and what they gather."""
    gathered = made.channel().all_gather(np.array([dist.get_rank()]))
    exchanged = [_sum_over(made.group_for("exchange", torch.device("cpu")))] if made.num_ranks > 1 else []
    return [*exchanged, int(gathered.sum())]


def _sums_in_one_set_after_another(sets: list[list[list[int]]]) -> list[int]:
    """Returns the sums of sets that divide the ranks, of all, and of some that torch then groups."""
    sums = []
    for each in sets:
        mine, _ = dist.new_subgroups_by_enumeration(each)
        sums += _sums(RankGroup.of(mine, ["exchange"]))
        of_all = dist.new_group()
        sums.append(_sum_over(of_all))
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    sums += [_sum_over(pair) for pair in pairs if dist.get_rank(pair) >= 0]
    return [*sums, *_sums(RankGroup.of(None, ["exchange"]))]


def test_groups_of_some_ranks_do_not_keep_later_ones_from_forming(pools):
    sets = [[[0, 2], [1, 3]], [[0, 1, 2], [3]], [[1, 3], [0, 2]], [[3, 0], [2, 1]]]
    first, second, third, fourth = pools(4).run(_sums_in_one_set_after_another, sets)
    assert first == [2, 2, 6, 3, 3, 6, 2, 2, 6, 3, 3, 6, 1, 6, 6]
    assert second == [4, 4, 6, 3, 3, 6, 4, 4, 6, 3, 3, 6, 1, 3, 6, 6]
    assert third == [2, 2, 6, 3, 3, 6, 2, 2, 6, 3, 3, 6, 3, 6, 6]
    assert fourth == [4, 4, 6, 3, 6, 4, 4, 6, 3, 3, 6, 6, 6]


def _sums_after_leaving_a_job() -> list[int]:
    """Returns what ranks gather and exchange in one job after another, in the same processes."""
    sums: list[int] = []
    for _ in range(2):
        sums += _sums(RankGroup.of(None, ["exchange"]))
        os.environ["MASTER_PORT"] = str(_next_port())
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo")
    return sums


def _next_port() -> int:
    """Returns a free port of rank 0's host, on all ranks."""
    ports = [free_port()]
    dist.broadcast_object_list(ports)
    return ports[0]


def test_a_process_that_joins_another_job_gets_groups_of_that_job():
    pool = ProcessPool(2)  # of its own, because it leaves its job
    assert pool.run(_sums_after_leaving_a_job) == [[1, 1, 1, 1]] * 2
    pool.close()


def _sums_after_other_pasts() -> list[int]:
    """Returns what three ranks gather and exchange, of which two had a job of their own before."""
    rank, port, last_port = dist.get_rank(), _next_port(), _next_port()
    dist.barrier()
    dist.destroy_process_group()
    if rank < 2:
        store = dist.TCPStore("localhost", port, 2, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        assert _sums(RankGroup.of(None, ["exchange"])) == [1, 1]
        dist.barrier()
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(last_port)
    dist.init_process_group("gloo")
    return _sums(RankGroup.of(None, ["exchange"]))


def test_ranks_that_were_in_different_jobs_before_agree_on_groups():
    pool = ProcessPool(3)  # of its own, because it leaves its job
    assert pool.run(_sums_after_other_pasts) == [[3, 3]] * 3
    pool.close()


def _groups_and_timeouts() -> tuple[list[int], set[timedelta]]:
    """Returns the groups of this process after each of two shufflers, which work, and their timeouts."""
    cpu, counts = torch.device("cpu"), []
    dist.group.WORLD._get_backend(cpu).options._timeout = timedelta(hours=2)  # as init_process_group sets it
    shuffler: BatchShuffler
    for _ in range(2):
        shuffler = FieldShuffler()
        shuffler.shuffle(lopsided_batch())
        counts.append(len(dist.distributed_c10d._world.pg_map))
    groups = shuffler.group.control, shuffler.group.group_for("exchange", cpu)
    return counts, {group._get_backend(cpu).options._timeout for group in groups}


def test_shufflers_share_two_groups_with_the_timeout_of_the_job():
    pool = ProcessPool(2)  # of its own, because it changes the timeout and counts groups
    for counts, timeouts in pool.run(_groups_and_timeouts):
        assert counts == [3, 3]  # the job's, control and exchange
        assert timeouts == {timedelta(hours=2)}
    pool.close()


def _rows_and_objects(sizes: list[int]) -> list:
    channel = RankGroup.of().channel()
    rank = dist.get_rank()
    rows = [channel.all_gather(np.arange(size, dtype=np.int64) + 100 * rank) for size in sizes]
    values = [channel.all_gather_objects("x" * (rank * size)) for size in sizes]
    return [[row.tolist() for row in rows], values]


def _groups_of_two_shufflers() -> list[int]:
    """Returns the groups of this process after each of some shufflers, whose sets divide the ranks."""
    own, _ = dist.new_subgroups_by_enumeration([[0, 1], [2]])
    counts = []
    for group in (None, own, own, None):
        FieldShuffler(group).shuffle(lopsided_batch())
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_shufflers_for_the_same_ranks_share_groups():
    pool = ProcessPool(3)  # of its own, because it counts groups
    # The job's, the user's, control and exchange of all ranks, and of the set where it has several.
    assert pool.run(_groups_of_two_shufflers) == [[4, 6, 6, 6]] * 2 + [[4, 4, 4, 4]]
    pool.close()


@on_ranks(2)
def test_the_host_of_a_job_on_gpus_uses_the_group_for_planning():
    cpu, group = torch.device("cpu"), RankGroup.of(None, ["exchange"])
    assert group.group_for("exchange", cpu) is not group.control
    with pytest.raises(KeyError):
        group.group_for("another use", cpu)
    with mock.patch.object(rank_group, "job_device", lambda: torch.device("cuda", 0)):
        assert group.group_for("another use", cpu) is group.control


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_rank_gets_what_each_gave(pools, num_ranks):
    sizes = [1, 5, 1000]
    rows = [[[n + 100 * rank for n in range(size)] for rank in range(num_ranks)] for size in sizes]
    values = [["x" * (rank * size) for rank in range(num_ranks)] for size in sizes]
    assert pools(num_ranks).run(_rows_and_objects, sizes) == [[rows, values]] * num_ranks


@on_ranks(3)
def test_an_object_that_does_not_pickle_fails_on_every_rank_and_leaves_the_channel_usable():
    channel, rank = RankGroup.of().channel(), dist.get_rank()
    error = error_of(channel.all_gather_objects, threading.Lock() if rank == 1 else rank)
    assert error.startswith("TypeError: cannot pickle '_thread.lock' object")
    assert channel.all_gather_objects(rank) == [0, 1, 2]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_rank_gets_the_batch_of_one(pools, num_ranks):
    for batches in pools(num_ranks).run(_broadcast_from_each):
        assert batches == [("x" * rank, [rank] * 1000) for rank in range(num_ranks)]


def _broadcast_from_each() -> list:
    channel, rank = RankGroup.of().channel(), dist.get_rank()
    mine = "x" * rank, torch.full((1000,), rank)
    got = [channel.broadcast(mine if sender == rank else None, sender) for sender in range(channel.num_ranks)]
    return [(text, numbers.tolist()) for text, numbers in got]


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
            group._last_tag += 1
    return [group.channel().tag for _ in range(2)]


def test_ranks_agree_on_a_channel_although_one_has_counted_more(pools):
    first, second = pools(2).run(_channels_after_a_failure)
    assert first == second and len(set(first)) == 2


def _error_of_a_shuffler_from_before_the_job() -> list[str]:
    dist.barrier()
    dist.destroy_process_group()
    shuffler, off = FieldShuffler(), FieldShuffler(enabled=False)
    dist.init_process_group("gloo")
    calls = (
        lambda: shuffler.plan(lopsided_batch()),
        lambda: next(shuffler.plan_ahead([lopsided_batch()])),
        lambda: shuffler.plan_over(RankGroup.of()),
        lambda: off.plan(lopsided_batch()),
    )
    return [error_of(call) for call in calls]


def test_a_shuffler_that_was_made_before_the_job_is_refused():
    pool = ProcessPool(2)  # of its own, because it leaves its job
    expected = (
        "RuntimeError: this FieldShuffler was made for 1 rank(s), and the job has 2 now: make it after "
        "init_process_group, and a new one for each job"
    )
    assert pool.run(_error_of_a_shuffler_from_before_the_job) == [[expected] * 4] * 2
    pool.close()
