"""Planning over all ranks, as pipelines do, with samples that stay within groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from commons.distributed import BalanceReport, BatchShufflerFactory, Extension, IdentityShuffler
from commons.distributed.rank_group import RankGroup
from commons.perf_model.cost import Cost
from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.loaded_batches import lopsided_batch
from tests.commons.distributed.shufflers import FieldShuffler, Posting


def _plan_of_pairs(identity: bool) -> tuple[list[int], list[float], list]:
    """Returns the ranks of a plan, their loads, and what all ranks know of the step."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    posting = Posting()
    shuffler = (
        IdentityShuffler(get_workloads=lambda batch: batch.workload, extensions=[posting])
        if identity
        else FieldShuffler(pairs[dist.get_rank() % 2], extensions=[posting])
    )
    alone = shuffler.plan(lopsided_batch())
    shuffler.plan_over(RankGroup.of())
    planner = shuffler.planner
    shuffler.plan_over(RankGroup.of())  # as for another pipeline, which goes on with what was agreed
    assert shuffler.planner is planner
    plan = shuffler.plan(lopsided_batch())
    assert identity or ((plan.rows.home == alone.rows.home).all() and plan == alone)
    whole = plan.whole
    facts = [whole.loads_before, whole.loads, whole.num_placed, [whole.num_loss_tokens], posting.newest]
    return list(shuffler.group.ranks), plan.loads.tolist(), [list(each) for each in facts]


def test_a_plan_in_step_with_all_ranks_is_that_of_its_group_and_tells_of_all(pools):
    for identity, groups in ((False, [[0, 2], [1], [0, 2]]), (True, [[0, 1, 2]] * 3)):
        results = pools(3).run(_plan_of_pairs, identity)
        assert [ranks for ranks, *_ in results] == groups
        loads = {
            rank: load for ranks, of_ranks, _ in results for rank, load in zip(ranks, of_ranks, strict=True)
        }
        for _, _, (before, after, placed, (loss_tokens,), posted) in results:
            assert after == [loads[rank] for rank in range(3)] and (before == after) == identity
            assert sum(before) == sum(after) and sum(placed) == 12 and loss_tokens > 0
            assert posted == [10, 11, 12]


class Learned(Extension):
    """Balances rank 1, which exchanges with no other, by a cost that it alone has learned."""

    name, order = "learned", 10

    def place(self, rows, place):
        return place(rows.with_cost(Cost((0.0, 0.0, 1000.0))) if rows.num_ranks == 1 else rows)


def _loads_by(cost: Cost | None) -> tuple[int, list[float], list[float]]:
    """Returns this rank's load by a shuffler's cost, and those of all ranks that a report has."""
    pairs, rank = [dist.new_group(ranks) for ranks in ([0, 2], [1])], dist.get_rank()
    shuffler, batch = FieldShuffler(pairs[rank % 2], cost=cost, extensions=[Learned()]), lopsided_batch()
    shuffler.plan_over(RankGroup.of())
    plan = shuffler.plan(batch)
    report = BalanceReport.of(plan, equal_rows=True)
    ended = shuffler.plan(None if rank == 1 else batch)  # a set without rows has loads, too
    assert ended.whole.loads.tolist()[1] == 0
    cost = cost or Cost.sum_of_columns(1)
    own = cost.of(1, shuffler.get_tokens(batch).numpy(), batch.workload[:, None].numpy())
    return int(own.sum()), report.job_loads_before.tolist(), report.job_loads_after.tolist()


@pytest.mark.parametrize("cost", [None, Cost((7.0, 0.0, 3.0))])
def test_loads_of_all_ranks_are_in_one_unit_whatever_a_set_has_learned(pools, cost):
    results = pools(3).run(_loads_by, cost)
    loaded = [own for own, *_ in results]
    for _, before, after in results:
        assert before == loaded and after[1] == loaded[1] and sum(after) == sum(loaded)
        assert after[0] < loaded[0]


def _failures_of_one_set(failing: int) -> tuple[str, bool, int]:
    """Returns the error of a step in which one rank fails, whether the next goes on, and collectives of a
    step: ranks 0 and 2 exchange, and rank 1 is alone."""
    pairs, rank = [dist.new_group(ranks) for ranks in ([0, 2], [1])], dist.get_rank()
    shuffler, batch = FieldShuffler(pairs[rank % 2]), lopsided_batch()
    shuffler.plan_over(RankGroup.of())
    shuffler.plan(batch)
    wrong = replace(batch, workload=-batch.workload - 1) if rank == failing else batch
    error = error_of(shuffler.plan, wrong)
    with recorded_collectives() as calls:
        plan = shuffler.plan(batch)
    return error, plan.has_batch, len(calls)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failure_in_one_group_reaches_all_and_a_step_takes_two_gathers(pools, failing):
    for error, goes_on, num_calls in pools(3).run(_failures_of_one_set, failing):
        assert "FieldShuffler.get_workloads returned -" in error and goes_on
        assert num_calls == 2


def _errors_of_inconsistent_ranks() -> list[str]:
    rank = dist.get_rank()
    low, high, outer = (
        FieldShuffler(dist.new_subgroups_by_enumeration(sets)[0])
        for sets in ([[0, 1], [2]], [[0], [1, 2]], [[0, 2], [1]])
    )
    # The group of rank 1 alone has no shuffler there, and later rank 1 takes part with one that rank 0 does
    # not expect.
    identity_in_a_group = BatchShufflerFactory.create("identity") if rank == 1 else outer
    everyone = RankGroup.of()
    return [
        error_of(shuffler.plan_over, everyone)
        for shuffler in (identity_in_a_group, low if rank == 0 else high)
    ]


class WorkloadTokens(FieldShuffler):
    """A sample has as many tokens as its workload."""

    def get_tokens(self, batch):
        return batch.workload


def _errors_of_the_last_rank() -> list[str]:
    """Returns errors of rank 2, the second of its set: of a batch, of tokens, and of settings."""
    pairs, rank = [dist.new_group(ranks) for ranks in ([0, 2], [1])], dist.get_rank()
    batch, errors = lopsided_batch(), []
    for wrong in (replace(batch, matrix=batch.matrix.half()), replace(batch, workload=batch.workload + 999)):
        shuffler = WorkloadTokens(pairs[rank % 2], max_tokens=900)
        shuffler.plan_over(RankGroup.of())
        shuffler.plan(batch)
        errors.append(error_of(shuffler.plan, wrong if rank == 2 else batch))
    errors.append(error_of(FieldShuffler, pairs[rank % 2], equal_rows=rank == 2))
    return [error.split("\n")[0] for error in errors]


def test_errors_of_a_set_name_ranks_of_the_job(pools):
    first, second, third = pools(3).run(_errors_of_the_last_rank)
    assert first == third and second == [*first[:2], "no error"]
    kind, tokens, settings = first
    assert kind.startswith("ValueError: rank 2 has a batch that differs from that of the first batch")
    assert tokens.startswith("ValueError: row 0 of rank 2 has")
    assert settings.startswith("ValueError: rank 2's shuffler has equal_rows=True, but rank 0's has False")


def _errors_of_other_settings() -> list[str]:
    """Returns the errors of a pipeline's planner, and of one among the group."""
    other = {"equal_rows": dist.get_rank() == 1}
    identity = IdentityShuffler(**other)
    return [error_of(identity.plan_over, RankGroup.of()), error_of(FieldShuffler, **other)]


def test_ranks_with_different_settings_are_refused_on_all(pools):
    results = pools(3).run(_errors_of_other_settings)
    assert results == [results[0]] * 3
    for error in results[0]:
        assert error == (
            "ValueError: rank 1's shuffler has equal_rows=True, but rank 0's has False; all ranks need the "
            "same settings"
        )


def test_ranks_in_overlapping_groups_are_refused_on_all(pools):
    results = pools(3).run(_errors_of_inconsistent_ranks)
    consistent, groups = results[0]
    assert results == [results[0]] * 3
    assert consistent == "no error"
    assert groups.startswith(
        "ValueError: a rank balances among ranks [0, 1], but one of these ranks among others"
    )
