"""Process groups that shufflers share, sets of ranks that a job agrees on, and processes that change jobs."""

import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import IdentityShuffler
from commons.distributed import ranks as module_of_ranks
from tests.commons.distributed.errors_and_warnings import error_of, error_of_all
from tests.commons.distributed.internals import RankGroup
from tests.commons.distributed.loaded_batches import lopsided_batch
from tests.commons.distributed.shufflers import FieldShuffler
from tests.on_ranks import on_ranks
from tests.process_pool import ProcessPool, RankError, free_port

CPU = torch.device("cpu")
Sets = Sequence[Sequence[int] | None]


def _sum_over(group: dist.ProcessGroup | None) -> int:
    rank = torch.tensor(dist.get_rank())
    dist.all_reduce(rank, group=group)
    return int(rank)


def _check_connected(process_group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
    """Checks that these ranks gather and exchange in a group of theirs. Collective over the job."""
    made = RankGroup.of(process_group, ["exchange"])
    assert made.ranks == tuple(ranks)
    assert made.channel().all_gather(np.array([dist.get_rank()]))[:, 0].tolist() == list(ranks)
    if len(ranks) > 1:
        assert _sum_over(made.group_for("exchange", CPU)) == sum(ranks)


@on_ranks(4)
def test_groups_of_some_ranks_do_not_keep_later_ones_from_forming():
    for sets in ([[0, 2], [1, 3]], [[0, 1, 2], [3]], [[1, 3], [0, 2]], [[3, 0], [2, 1]]):
        own, _ = dist.new_subgroups_by_enumeration(sets)
        _check_connected(own, next(sorted(each) for each in sets if dist.get_rank() in each))
        assert _sum_over(dist.new_group()) == 6
    for ranks in ([0, 1], [1, 2]):
        pair = dist.new_group(ranks)
        assert dist.get_rank() not in ranks or _sum_over(pair) == sum(ranks)
    _check_connected(None, range(4))


def _agreed_on(sets: Sets, come_after: Sequence[float | None]) -> str:
    """Returns the ranks of this rank's shuffler, or the error of making it.

    Ranks name these sets, or all ranks, after so many seconds; without seconds, one makes an identity.
    """
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(ranks) for ranks in sorted({tuple(each) for each in sets if each})}
    ranks, seconds = sets[rank], come_after[rank]
    group = None if ranks is None else groups[tuple(ranks)]
    dist.barrier()
    time.sleep(seconds or 0)
    start, made = time.monotonic(), []
    error = error_of(lambda: made.append(IdentityShuffler() if seconds is None else FieldShuffler(group)))
    assert time.monotonic() - start < module_of_ranks.PATIENCE_S + 2
    return str(made[0].group.ranks) if made else error


def _agreed_in_time(cases: Sequence[Sets]) -> list[str]:
    """Returns what ranks agree on that come one after another, and then has them agree again."""
    late = [0.1 * (dist.get_world_size() - rank) for rank in range(dist.get_world_size())]
    results = [_agreed_on(sets, late) for sets in cases]
    assert FieldShuffler().shuffle(lopsided_batch()).num_samples
    return results


# By number of ranks: the sets that ranks name, and what they agree on, or the error that all raise.
AGREEMENTS: dict[int, list[tuple[Sets, list[str] | str]]] = {
    3: [
        ([[0, 1], [0, 1], [2]], ["(0, 1)", "(0, 1)", "(2,)"]),
        ([[0], [1], [2]], ["(0,)", "(1,)", "(2,)"]),
        ([None, [0, 1, 2], None], ["(0, 1, 2)"] * 3),
        ([[0, 1], [0, 1], None], "rank 2 makes a shuffler, or a pipeline, for all ranks, and rank 0"),
        ([[0, 1], [1, 2], [1, 2]], "rank 0 makes a shuffler for ranks 0 and 1, and rank 1"),
        ([[0, 1], [0, 1], [0, 1]], "rank 2 is not in the process_group it was given"),
    ],
    4: [([[0, 2], [1, 3], [0, 2], [1, 3]], ["(0, 2)", "(1, 3)"] * 2)],
}


@pytest.mark.parametrize("num_ranks", AGREEMENTS)
def test_all_ranks_agree_on_sets_or_raise_the_same_error(pools, num_ranks):
    of_ranks = pools(num_ranks).run(_agreed_in_time, [sets for sets, _ in AGREEMENTS[num_ranks]])
    for (sets, expected), results in zip(AGREEMENTS[num_ranks], zip(*of_ranks, strict=True), strict=True):
        if isinstance(expected, str):
            assert results == results[:1] * num_ranks, sets
            assert results[0].startswith(f"ValueError: {expected}")
        else:
            assert list(results) == expected, sets


@on_ranks(2)
def test_ranks_on_which_torch_has_counted_other_groups_are_named():
    own, _ = dist.new_subgroups_by_enumeration([[0], [1]])
    # As torch 2.14 does for a group that rank 0 alone makes.
    of_torch, on_first = dist.distributed_c10d._world, int(dist.get_rank() == 0)
    of_torch.group_count += on_first
    try:
        error = error_of_all(FieldShuffler, own)
    finally:
        of_torch.group_count -= on_first
    assert "process groups on rank 1 and" in error and "without use_local_synchronization=True" in error


@on_ranks(2)
def test_the_host_of_a_job_on_gpus_uses_the_group_for_planning():
    group = RankGroup.of(None, ["exchange"])
    assert group.group_for("exchange", CPU) is not group.control
    with pytest.raises(KeyError):
        group.group_for("another use", CPU)
    with mock.patch.object(module_of_ranks, "job_device", lambda: torch.device("cuda", 0)):
        assert group.group_for("another use", CPU) is group.control


# What ranks do that leave their job, and join others in the same processes.


def _next_port() -> int:
    """Returns a free port of rank 0's host, on all ranks."""
    ports = [free_port()]
    dist.broadcast_object_list(ports)
    return ports[0]


def _leave_the_job() -> None:
    os.environ["MASTER_PORT"] = str(_next_port())  # of the next one
    dist.barrier()
    dist.destroy_process_group()


def _join_another_job() -> None:
    _leave_the_job()
    dist.init_process_group("gloo", timeout=timedelta(hours=2))


def _other_jobs_on_some_ranks() -> None:
    _check_connected(None, range(3))
    port, rank = _next_port(), dist.get_rank()
    _leave_the_job()
    if rank < 2:
        store = dist.TCPStore("localhost", port, 2, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        _check_connected(None, range(2))
        dist.barrier()
        dist.destroy_process_group()
    dist.init_process_group("gloo")
    _check_connected(None, range(3))


def _shufflers_from_before_the_job() -> None:
    _leave_the_job()
    shuffler, off = FieldShuffler(), FieldShuffler(enabled=False)
    dist.init_process_group("gloo")
    for call in (
        lambda: shuffler.plan(lopsided_batch()),
        lambda: next(shuffler.plan_ahead([lopsided_batch()])),
        lambda: shuffler.plan_over(RankGroup.of()),
        lambda: off.plan(lopsided_batch()),
    ):
        error = error_of(call)
        assert error.startswith("RuntimeError: this FieldShuffler was made for 1 rank(s), and the job has 3")
        assert "make it after init_process_group" in error


def _two_groups_for_each_set() -> None:
    """Shufflers for the same ranks share a group for planning and one to exchange, with the job's timeout."""
    _join_another_job()
    own, _ = dist.new_subgroups_by_enumeration([[0, 1], [2]])
    of_torch, counts = dist.distributed_c10d._world.pg_map, []
    before = len(of_torch)
    for group in (None, own, own, None):
        shuffler = FieldShuffler(group)
        shuffler.shuffle(lopsided_batch())
        counts.append(len(of_torch) - before)
    assert counts == ([2, 2, 2, 2] if dist.get_rank() == 2 else [2, 4, 4, 4])
    for made in (shuffler.group.control, shuffler.group.group_for("exchange", CPU)):
        assert made._get_backend(CPU).options._timeout == timedelta(hours=2)


def _a_set_beside_a_pipeline() -> None:
    _join_another_job()  # in which nothing has connected all ranks
    pair = dist.new_group([0, 1])
    error = error_of_all(*((RankGroup.of,) if dist.get_rank() == 2 else (FieldShuffler, pair)))
    assert error.startswith("ValueError: rank 2 makes a shuffler, or a pipeline, for all ranks, and rank 0")


def _ranks_that_do_not_come_in_time() -> None:
    _join_another_job()
    with mock.patch.object(module_of_ranks, "PATIENCE_S", 0.5):
        error = _agreed_on([[0, 1], [0, 1], [2]], [0.0, None, 1.2])
    if dist.get_rank() == 1:
        assert error == "(1,)"  # of an identity, which takes no part
    else:  # rank 2 comes when rank 0 has given up
        missing = {0: "ranks 1 and 2", 2: "ranks 0 and 1"}[dist.get_rank()]
        assert error.startswith(f"RuntimeError: {missing} have not made a shuffler within 0.5 s: ")
        assert "new_subgroups_by_enumeration" in error and "dist.barrier()" in error


@pytest.fixture(scope="module")
def leaving() -> Iterator[ProcessPool]:
    """Three processes of their own, because they leave their job."""
    pool = ProcessPool(3)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "scenario",
    [
        _other_jobs_on_some_ranks,
        _shufflers_from_before_the_job,
        _two_groups_for_each_set,
        _ranks_that_do_not_come_in_time,
        _a_set_beside_a_pipeline,
    ],
)
def test_processes_that_change_jobs(leaving, scenario):
    leaving.run(scenario)


def _left_by_one_while_the_others_gather() -> None:
    _join_another_job()
    channel = RankGroup.of().channel()
    if dist.get_rank() == 1:
        os._exit(1)
    channel.all_gather(np.zeros(1))


def test_a_lost_connection_says_that_another_rank_shows_the_cause(leaving):
    with pytest.raises(RankError) as raised:
        leaving.run(_left_by_one_while_the_others_gather)
    waiting, left, _ = raised.value.by_rank
    assert left == "the process died"
    assert "rank 0 ends, because it lost the connection to another rank: that rank's traceback" in waiting
