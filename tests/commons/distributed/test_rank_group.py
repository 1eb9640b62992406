"""The process groups that shufflers share, their timeout, and groups of some ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed import BatchShuffler
from commons.distributed.rank_group import RankGroup
from tests.commons.distributed.loaded_batches import lopsided_batch
from tests.commons.distributed.shufflers import FieldShuffler
from tests.process_pool import ProcessPool


def _sum_over(group: dist.ProcessGroup | None) -> int:
    rank = torch.tensor(dist.get_rank())
    dist.all_reduce(rank, group=group)
    return int(rank)


def _balance_among_some() -> list[int]:
    """Ranks are in different numbers of groups, and make different numbers of them to balance among."""
    low, outer = dist.new_group([0, 1]), dist.new_group([0, 3])
    sums = []
    parents = {0: [outer, low, outer], 1: [low], 3: [outer, outer]}.get(dist.get_rank(), [])
    for parent in parents:
        made = RankGroup.of(parent)
        rank = np.array([dist.get_rank()])
        sums += [
            _sum_over(made.group_for("exchange", torch.device("cpu"))),
            int(made.channel().all_gather(rank).sum()),
        ]
    everyone = dist.new_group()
    return [*sums, _sum_over(everyone)]


def test_groups_of_some_ranks_do_not_keep_later_ones_of_all_from_forming(pools):
    first, second, third, fourth = pools(4).run(_balance_among_some)
    assert first == [3, 3, 1, 1, 3, 3, 6]
    assert second == [1, 1, 6]
    assert third == [6]
    assert fourth == [3, 3, 3, 3, 6]


def _sums_after_leaving_a_job() -> list[int]:
    """Returns what ranks gather and exchange in one job after another, in the same processes."""
    sums, rank = [], dist.get_rank()
    for port_offset in range(2):
        made = RankGroup.of()
        sums.append(int(made.channel().all_gather(np.array([rank])).sum()))
        sums.append(_sum_over(made.group_for("exchange", torch.device("cpu"))))
        dist.barrier()
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1 + port_offset)
        dist.init_process_group("gloo")
    return sums


def test_a_process_that_joins_another_job_gets_groups_of_that_job():
    pool = ProcessPool(2)  # of its own, because it leaves its job
    assert pool.run(_sums_after_leaving_a_job) == [[1, 1, 1, 1]] * 2
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
