"""All ranks of a job agree on the sets to balance among, and those that do not come are named."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from commons.distributed import IdentityShuffler, rank_group
from commons.distributed.rank_group import RankGroup, ranks_text
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.loaded_batches import lopsided_batch
from tests.commons.distributed.shufflers import FieldShuffler
from tests.on_ranks import on_ranks
from tests.process_pool import ProcessPool


def _errors(sets: Sequence[Sequence[int] | None], come_after: Sequence[float | None], limit: float) -> str:
    """Returns this rank's error, and the shuffler's ranks where it has none.

    Args:
        sets: by rank, the ranks that it names; None for all.
        come_after: by rank, the seconds after which it makes its shuffler; None if it makes an identity.
        limit: seconds that ranks wait for others.
    """
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(ranks) for ranks in sorted({tuple(each) for each in sets if each})}
    ranks, seconds = sets[rank], come_after[rank]
    group = None if ranks is None else groups[tuple(ranks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_group, "PATIENCE_S", limit)
        dist.barrier()
        time.sleep(seconds or 0)
        start, made = time.monotonic(), []
        error = error_of(lambda: made.append(IdentityShuffler() if seconds is None else FieldShuffler(group)))
        assert time.monotonic() - start < limit + 2
    if not made:
        return error
    return str(made[0].group.ranks)


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([[0, 1], [0, 1], [2]], ["(0, 1)", "(0, 1)", "(2,)"]),
        ([[0, 2], [1, 3], [0, 2], [1, 3]], ["(0, 2)", "(1, 3)"] * 2),
        ([[0], [1], [2]], ["(0,)", "(1,)", "(2,)"]),
        ([None, [0, 1, 2], None], ["(0, 1, 2)"] * 3),
    ],
)
def test_each_rank_gets_its_own_set_however_late_it_comes_within_the_limit(pools, sets, expected):
    late = [0.3 * (len(sets) - rank) for rank in range(len(sets))]
    assert pools(len(sets)).run(_errors, sets, late, 60.0) == expected


@pytest.mark.parametrize("late", [None, 4.0])
def test_ranks_that_do_not_come_in_time_are_named(late):
    pool = ProcessPool(4)  # of its own, because its ranks do not agree on how often they agreed
    sets = [[0, 1], [0, 1], [2], [3]]
    results = pool.run(_errors, sets, [0.0, 0.5, late, late], 2.0)
    pool.close(kill=True)
    error = (
        "RuntimeError: ranks 2 and 3 have not made a shuffler within 2 s: making one for some of the ranks "
        "is collective over the job: all ranks make theirs at the same time. A rank that keeps its samples "
        "makes the same shuffler in a group of itself, as in own, _ = "
        "dist.new_subgroups_by_enumeration([[0, 1], [2]]), because an identity shuffler "
        "takes no part. If they are only late, have all ranks wait for them first, as in "
        "dist.barrier()"
    )
    assert results[:2] == [error] * 2
    assert results[2:] == (["(2,)", "(3,)"] if late is None else [error] * 2)


def test_a_rank_that_does_not_come_to_all_ranks_is_named():
    pool = ProcessPool(2)
    waiting, absent = pool.run(_errors, [None, None], [0.0, None], 1.0)
    pool.close(kill=True)
    assert absent == "(1,)"
    assert waiting.startswith(
        "RuntimeError: rank 1 has not made a shuffler within 1 s: making one for all ranks, or a pipeline, "
        "is collective over them. If they are only late"
    )


@pytest.mark.parametrize(
    ("sets", "error"),
    [
        ([[0, 1], [0, 1], None], "rank 2 makes a shuffler, or a pipeline, for all ranks, and rank 0"),
        ([[0, 1], [1, 2], [1, 2]], "rank 0 makes a shuffler for ranks 0 and 1, and rank 1"),
        ([[0, 1], [0, 1], [0, 1]], "rank 2 is not in the process_group it was given"),
    ],
)
def test_sets_that_do_not_agree_are_an_error_on_all_ranks(pools, sets, error):
    results = pools(3).run(_errors, sets, [0.0, 0.0, 0.0], 60.0)
    assert results == results[:1] * 3
    assert results[0].startswith(f"ValueError: {error}")


def _error_beside_a_pipeline() -> str:
    pair = dist.new_group([0, 1])
    return error_of(RankGroup.of) if dist.get_rank() == 2 else error_of(FieldShuffler, pair)


def test_a_set_beside_the_pipeline_of_an_identity_is_an_error_on_all_ranks():
    pool = ProcessPool(3)  # in which nothing has connected all ranks
    errors = pool.run(_error_beside_a_pipeline)
    pool.close()
    assert errors == errors[:1] * 3
    assert errors[0].startswith(
        "ValueError: rank 2 makes a shuffler, or a pipeline, for all ranks, and rank 0 at the same time one "
        "for ranks 0 and 1: making one for some of the ranks is collective over the job"
    )


@on_ranks(2)
def test_ranks_after_an_error_agree_again():
    own, _ = dist.new_subgroups_by_enumeration([[0], [1]])
    error_of(FieldShuffler, own if dist.get_rank() else None)
    assert FieldShuffler().shuffle(lopsided_batch()).num_samples


def _errors_where_torch_counts_differently() -> str:
    own, _ = dist.new_subgroups_by_enumeration([[0], [1]])
    # As torch 2.14 does for a group that rank 0 alone makes.
    dist.distributed_c10d._world.group_count += dist.get_rank() == 0
    return error_of(FieldShuffler, own)


def test_ranks_on_which_torch_has_counted_other_groups_are_named():
    pool = ProcessPool(2)
    first, second = pool.run(_errors_where_torch_counts_differently)
    pool.close(kill=True)
    assert first == second
    assert "process groups on rank 1 and" in first and "without use_local_synchronization=True" in first


def test_ranks_are_listed_in_words():
    assert [ranks_text(range(count)) for count in (1, 2, 3)] == [
        "rank 0",
        "ranks 0 and 1",
        "ranks 0, 1 and 2",
    ]
    assert ranks_text(range(100), most=3) == "ranks 0, 1 and 98 more"
