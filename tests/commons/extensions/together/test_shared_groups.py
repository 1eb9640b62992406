"""Verification and the way back use the process groups that there are."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from commons.extensions.unshuffle import Unshuffle
from commons.extensions.verification import Verification
from tests.commons.distributed.loaded_batches import lopsided_batch
from tests.commons.distributed.shufflers import FieldShuffler
from tests.process_pool import ProcessPool


def _groups_and_timeout() -> tuple[list[int], timedelta]:
    """Returns the groups of this process after each of three shufflers, and the timeout of the way back."""
    cpu, counts = torch.device("cpu"), []
    dist.group.WORLD._get_backend(cpu).options._timeout = timedelta(hours=2)  # as init_process_group sets it
    for verify in (False, True, True):
        unshuffle = Unshuffle()
        shuffler = FieldShuffler(extensions=[unshuffle, *([Verification()] if verify else [])])
        plan = shuffler.plan(lopsided_batch())
        unshuffle.unshuffle(shuffler.exchange(lopsided_batch(), plan).workload, plan)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts, shuffler.group.group_for("exchange", cpu)._get_backend(cpu).options._timeout


def test_shufflers_share_two_groups_with_the_timeout_of_the_job():
    pool = ProcessPool(2)  # of its own, because it changes the timeout and counts groups
    for counts, timeout in pool.run(_groups_and_timeout):
        assert counts == [3, 3, 3]  # the job's, control and exchange
        assert timeout == timedelta(hours=2)
    pool.close()
