"""Planning over all ranks, as pipelines do, with samples that stay within groups."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from commons.distributed import BatchShufflerFactory, IdentityShuffler
from commons.distributed.rank_group import RankGroup
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.loaded_batches import lopsided_batch
from tests.commons.distributed.shufflers import FieldShuffler


def _plan_of_pairs(identity: bool) -> tuple[list[int], int]:
    """Returns the ranks that exchange samples with this one, and the fingerprint of the plan of all ranks."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    shuffler = (
        IdentityShuffler(get_workloads=lambda batch: batch.workload)
        if identity
        else FieldShuffler(pairs[dist.get_rank() % 2])
    )
    batch = lopsided_batch()
    alone = shuffler.plan(batch)
    shuffler.plan_over(RankGroup.of())
    everyone = shuffler.planner.plan(shuffler.view(batch))
    assert everyone.num_ranks == 3
    here = shuffler.planner.within_set(everyone)
    assert np.array_equal(here.rows.workloads, alone.rows.workloads)
    assert np.array_equal(here.destination, alone.destination)
    assert np.array_equal(here.num_rows, alone.num_rows)
    return list(shuffler.group.ranks), everyone.fingerprint


def test_a_planner_of_all_ranks_places_as_each_group_does(pools):
    for identity, groups in ((False, [[0, 2], [1], [0, 2]]), (True, [[0], [1], [2]])):
        results = pools(3).run(_plan_of_pairs, identity)
        assert [ranks for ranks, _ in results] == groups
        assert len({fingerprint for _, fingerprint in results}) == 1


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


def _errors_of_other_settings() -> list[str]:
    """Returns the errors of a pipeline's planner, and of a plan among the group."""
    other = {"equal_rows": dist.get_rank() == 1}
    identity = IdentityShuffler(**other)
    identity.plan_over(RankGroup.of())
    return [error_of(identity.plan, None), error_of(FieldShuffler(**other).plan, lopsided_batch())]


def test_ranks_with_different_settings_are_refused_on_all(pools):
    results = pools(3).run(_errors_of_other_settings)
    assert results == [results[0]] * 3
    for error in results[0]:
        assert error == (
            "ValueError: rank 1's shuffler has equal_rows=True, that of rank 0 False; all ranks need the "
            "same settings"
        )


def test_ranks_in_overlapping_groups_are_refused_on_all(pools):
    results = pools(3).run(_errors_of_inconsistent_ranks)
    consistent, groups = results[0]
    assert results == [results[0]] * 3
    assert consistent == "no error"
    assert groups.startswith("ValueError: a rank balances among ranks [0, 1], and one of these among others")
