"""Planning over all ranks, as pipelines do, with samples that stay within groups."""

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from commons.distributed import BalanceReport, Extension, IdentityShuffler
from commons.perf_model import Cost
from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.distributed.errors_and_warnings import error_of, error_of_all
from tests.commons.distributed.internals import RankGroup
from tests.commons.distributed.loaded_batches import lopsided_batch
from tests.commons.distributed.shufflers import FieldShuffler, Posting
from tests.on_ranks import on_ranks


def _own_set(*sets: list[int]) -> dist.ProcessGroup:
    """Returns this rank's group of the sets that the ranks are divided into. Collective over the job."""
    return dist.new_subgroups_by_enumeration(list(sets))[0]


def _in_pairs(kind: type[FieldShuffler] = FieldShuffler, **settings: Any) -> FieldShuffler:
    """Returns a shuffler of ranks 0 and 2, or of rank 1 alone, which plans in step with all."""
    shuffler = kind(_own_set([0, 2], [1]), **settings)
    shuffler.plan_over(RankGroup.of())
    return shuffler


class _Unmoved(IdentityShuffler):
    def get_workloads(self, batch):
        return batch.workload


def _plan_of_pairs(identity: bool) -> tuple[list[int], list[float], list]:
    """Returns the ranks of a plan, their loads, and what all ranks know of the step."""
    posting = Posting()
    shuffler = (
        _Unmoved(extensions=[posting])
        if identity
        else FieldShuffler(_own_set([0, 2], [1]), extensions=[posting])
    )
    alone = shuffler.plan(lopsided_batch())
    shuffler.plan_over(RankGroup.of())
    planner = shuffler.planner
    shuffler.plan_over(RankGroup.of())  # as for another pipeline, which goes on with what was agreed
    assert shuffler.planner is planner
    plan = shuffler.plan(lopsided_batch())
    assert identity or ((plan.rows.home == alone.rows.home).all() and plan == alone)
    whole = plan.whole
    facts = [whole.loads_before, whole.loads, whole.num_placed, [whole.num_loss_tokens], *posting.taken[-1]]
    return list(shuffler.group.ranks), plan.loads.tolist(), [list(each) for each in facts]


@pytest.mark.parametrize(("identity", "groups"), [(False, [[0, 2], [1], [0, 2]]), (True, [[0, 1, 2]] * 3)])
def test_a_plan_in_step_with_all_ranks_is_that_of_its_group_and_tells_of_all(pools, identity, groups):
    results = pools(3).run(_plan_of_pairs, identity)
    assert [ranks for ranks, *_ in results] == groups
    loads = {rank: load for ranks, of_ranks, _ in results for rank, load in zip(ranks, of_ranks, strict=True)}
    for _, _, (before, after, placed, (loss_tokens,), *posted) in results:
        assert after == [loads[rank] for rank in range(3)] and (before == after) == identity
        assert sum(before) == sum(after) and sum(placed) == 12 and loss_tokens > 0
        assert posted == [[10], [11], [12]]


class Learned(Extension):
    """Balances rank 1, which exchanges with no other, by a cost that it alone has learned."""

    name, order = "learned", 10

    def setup(self, shuffler):
        self.num_ranks = shuffler.group.num_ranks

    def place(self, rows, place):
        assert rows.num_ranks == self.num_ranks == (1 if dist.get_rank() == 1 else 2)
        return place(rows.with_cost(Cost((0.0, 0.0, 1000.0))) if rows.num_ranks == 1 else rows)


@pytest.mark.parametrize("cost", [None, Cost((7.0, 0.0, 3.0))])
@on_ranks(3)
def test_loads_of_all_ranks_are_in_one_unit_whatever_a_set_has_learned(cost):
    shuffler, batch = _in_pairs(cost=cost, extensions=[Learned()]), lopsided_batch()
    report = BalanceReport.of(shuffler.plan(batch), equal_rows=True)
    ended = shuffler.plan(None if dist.get_rank() == 1 else batch)  # a set without rows has loads, too
    assert ended.whole.loads[1] == 0 and ended.whole.has_batch
    cost = cost or Cost.sum_of_columns(1)
    own = cost.of(1, shuffler.get_tokens(batch).numpy(), batch.workload[:, None].numpy()).sum()
    before, after = report.job_loads_before.tolist(), report.job_loads_after.tolist()
    assert before[dist.get_rank()] == own
    assert after[1] == before[1] and sum(after) == sum(before) and after[0] < before[0]


class WorkloadTokens(FieldShuffler):
    def get_tokens(self, batch):
        return batch.workload


@on_ranks(3)
def test_a_failure_in_one_set_reaches_all_names_ranks_of_the_job_and_leaves_two_gathers_a_step():
    batch = lopsided_batch()
    for failing, wrong, message in (
        (1, {"workload": -batch.workload - 1}, "WorkloadTokens.get_workloads returned -"),
        (2, {"workload": -batch.workload - 1}, "WorkloadTokens.get_workloads returned -"),
        (2, {"workload": batch.workload + 999}, "row 0 of rank 2 has"),
        (2, {"matrix": batch.matrix.half()}, "rank 2 has a batch that differs from that of the first batch"),
        (2, {"matrix": batch.matrix[:, :1]}, "(pad in the forward, or to one width)"),
    ):
        shuffler = _in_pairs(WorkloadTokens, max_tokens=900)
        shuffler.plan(batch)
        error = error_of_all(shuffler.plan, replace(batch, **wrong) if dist.get_rank() == failing else batch)
        assert message in error, error
        with recorded_collectives() as calls:
            assert shuffler.plan(batch).has_batch
        assert len(calls) == 2


@on_ranks(3)
def test_ranks_that_do_not_go_together_are_refused_on_all():
    rank, everyone = dist.get_rank(), RankGroup.of()
    own = _own_set([0, 2], [1])
    outer = FieldShuffler(own)
    low, high = (FieldShuffler(_own_set(*sets)) for sets in ([[0, 1], [2]], [[0], [1, 2]]))
    settings = "'s shuffler has equal_rows=True, but rank 0's has False; all ranks need the same settings"
    for call, message in (
        (
            lambda: IdentityShuffler(equal_rows=rank == 1).plan_over(everyone),
            f"ValueError: rank 1{settings}",
        ),
        # Among ranks 0 and 2 alone.
        (
            lambda: FieldShuffler(own, equal_rows=rank == 2),
            "no error" if rank == 1 else f"ValueError: rank 2{settings}",
        ),
        # A group of rank 1 alone has no shuffler.
        (lambda: (IdentityShuffler() if rank == 1 else outer).plan_over(everyone), "no error"),
        # Rank 1 takes part with a shuffler that rank 0 does not expect.
        (
            lambda: (low if rank == 0 else high).plan_over(everyone),
            "ValueError: a rank balances among ranks [0, 1], but one of these ranks among others",
        ),
    ):
        assert error_of(call).startswith(message)
