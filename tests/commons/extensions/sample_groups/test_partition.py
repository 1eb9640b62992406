"""Groups of samples that belong together."""

import time
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.partition.groups import LOGNORMAL, ORDERS, USERS, draw
from commons.extensions.sample_groups import rebalance_groups
from commons.partition import imbalance, karmarkar_karp, lower_bound, rebalance
from tests.commons.partition.arguments import check_kinds_of_arguments, check_wrong_arguments
from tests.commons.partition.checks import (
    SLACK,
    as_lists,
    check_partition,
    is_no_worse,
    keeps,
    or_none,
    parts_at,
)
from tests.commons.partition.drawn_workloads import caps, samples_at_home
from tests.commons.partition.every_function import FUNCTIONS, Function, check_properties, problems_of
from tests.commons.partition.recorded_plans import CAPPED, EVEN_TOKENS, FREE, SPEEDS, checksum, from_home

ROWS, TOLERANCE = 32, 0.01

WITH_GROUPS = Function(
    lambda workloads, home, parts, equal_size, **options: rebalance_groups(
        workloads, home, parts, groups=np.arange(len(workloads)) % 7 - 3, equal_size=equal_size, **options
    ),
    FUNCTIONS["rebalance"].takes,
)


@given(problem=problems_of(WITH_GROUPS))
def test_each_sample_once_within_limits_whatever_the_unit(problem):
    check_properties(WITH_GROUPS, problem)


def test_wrong_arguments_are_named_and_their_kind_does_not_matter():
    check_wrong_arguments(rebalance_groups)
    check_kinds_of_arguments(rebalance_groups)


GROUPS = {"groups": lambda workloads, parts, rng: rng.integers(0, len(workloads) // 3, len(workloads))}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (GROUPS, 3070841435),
        ({**FREE, **GROUPS, **SPEEDS}, 285727933),
        ({**FREE, **GROUPS, **CAPPED}, 290034308),
        ({**GROUPS, **EVEN_TOKENS, "ranks_per_node": 4}, 2815565205),
    ],
)
def test_plans_are_the_same_on_every_machine(options, expected):
    assert checksum(from_home(rebalance_groups, **options)) == expected


def test_without_groups_it_is_rebalance():
    plans = (
        from_home(function, tolerance=0.01, **FREE, **CAPPED) for function in (rebalance, rebalance_groups)
    )
    assert checksum(next(plans)) == checksum(next(plans))


def most_ids(stream, partition):
    """The ids that the rank looks up which has most of them."""
    return max(stream.shared[np.unique(stream.user[samples])].sum() for samples in partition)


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("lengths", ["20 to 200", LOGNORMAL])
def test_few_ids_are_looked_up_twice(lengths, ranks):
    ids, ids_alone, most, ranks_per_user = [], [], [], []
    for seed in range(64 // ranks):
        for order in ORDERS:
            stream = draw(ranks, ROWS, "4 each", lengths, order, seed)
            homes = stream.home, ranks, TOLERANCE
            partition = rebalance_groups(stream.workloads, *homes, groups=stream.user)
            reached, bound = imbalance(stream.workloads, partition), lower_bound(stream.workloads, ranks)
            assert reached <= (1 + TOLERANCE) * bound * SLACK
            figures = stream.figures(partition)
            if order == "dealt":
                ranks_per_user.append(figures["ranks_per_user"])
                continue
            alone = rebalance(stream.workloads, *homes)
            ids.append(figures["unique_ids"])
            ids_alone.append(stream.figures(alone)["unique_ids"])
            most.append(most_ids(stream, partition) / most_ids(stream, parts_at(stream.home, ranks)))
    assert np.mean(most) <= 1.05
    assert np.mean(ids) <= (1.02 if lengths == "20 to 200" else np.mean(ids_alone))
    assert np.mean(ranks_per_user) <= (1.02 if lengths == "20 to 200" else 1.15)


@given(data=st.data(), equal_size=st.booleans())
def test_balance_and_limits_are_as_without_groups(data, equal_size):
    workloads, home, parts = data.draw(samples_at_home())
    group = st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1)
    groups = np.array(data.draw(st.lists(group, min_size=len(home), max_size=len(home))), dtype=np.int64)
    limits = data.draw(st.just({}) | caps(len(workloads), parts))
    given = {"equal_size": equal_size, **limits}
    place = partial(rebalance_groups, workloads, home, parts, TOLERANCE, **given)
    alone = or_none(rebalance, workloads, home, parts, TOLERANCE, **given)
    if alone is None:
        return
    partition = place(groups=groups)
    check_partition(partition, len(workloads), parts, equal_size)
    assert keeps(partition, limits)
    reached, bound = imbalance(workloads, partition), lower_bound(workloads, parts, equal_size)
    assert reached <= max(imbalance(workloads, alone), (1 + TOLERANCE) * bound) * SLACK
    if not limits:
        peers = imbalance(workloads, karmarkar_karp(workloads, parts))
        assert reached <= max(peers, (1 + TOLERANCE) * bound) * SLACK
    positive = np.unique(groups[groups >= 0])
    labels = dict(zip(positive, data.draw(st.permutations(range(len(positive)))), strict=True))
    relabeled = [labels.get(group, -1) for group in groups]
    assert as_lists(place(groups=np.array(relabeled, dtype=np.int64))) == as_lists(partition)


@pytest.mark.parametrize(
    ("workloads", "home", "groups", "limits"),
    [
        (
            [5e8, 0, 1e9, 1e9, 9, 5e8, 0, 1, 1, 5e8, 5e8, 9, 0],
            [0] * 5 + [1] * 4 + [2] * 4,
            [4, 5, 4, 4, 6, 5, 5, 2, 6, 2, 5, 3, 5],
            {},
        ),
        (
            [5, 4, 0, 2, 4, 5, 0],
            [1, 0, 1, 1, 0, 0, 0],
            [1, 2, 0, 1, 0, 0, 1],
            {"tokens": [3, 4, 7, 7, 4, 5, 4], "max_tokens": 17},
        ),
    ],
    ids=["equal loads above the target", "limits that only home keeps to"],
)
def test_equal_loads_are_leveled_and_limits_of_home_kept(workloads, home, groups, limits):
    partition = rebalance_groups(workloads, home, max(home) + 1, TOLERANCE, groups=groups, **limits)
    assert keeps(partition, limits)
    assert limits or is_no_worse(workloads, partition, karmarkar_karp(workloads, 3))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("ranks", "rows"), [(64, 32), (8, 512)])
def test_no_stream_takes_a_long_search(order, ranks, rows):
    one = np.ones(8, dtype=np.int64)
    rebalance_groups(one, one, 4, groups=one)  # compiles
    for users in USERS:
        stream = draw(ranks, rows, users, LOGNORMAL, order, seed=0)
        for groups in (stream.user, 0 * stream.user):
            started = time.process_time()
            rebalance_groups(stream.workloads, stream.home, ranks, TOLERANCE, groups=groups)
            assert time.process_time() - started < 1, users  # usually 1 to 40 ms


def test_users_with_hundreds_of_samples_are_on_few_ranks_if_copies_are_worth_it():
    stream = draw(8, 1024, "386 each", "2048", "dealt", seed=0)

    def figures(moves_per_copy):
        given = {"groups": stream.user, "moves_per_copy": moves_per_copy}
        return stream.figures(rebalance_groups(stream.workloads, stream.home, 8, **given))

    assert figures(64)["unique_ids"] <= 0.25
    dealt = figures(10)  # a user has 48 samples on each rank
    assert dealt["unique_ids"] == 1 and dealt["moved"] < 0.01


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("equal_size", [True, False])
def test_users_stay_on_one_rank_where_ranks_have_many_rows(order, equal_size):
    for users in USERS:
        stream = draw(8, 512, users, LOGNORMAL, order, seed=0)
        partition = rebalance_groups(
            stream.workloads, stream.home, 8, sizes=stream.sizes, groups=stream.user, equal_size=equal_size
        )
        bound = lower_bound(stream.workloads, 8, equal_size)
        assert imbalance(stream.workloads, partition) <= (1 + TOLERANCE) * bound * SLACK
        assert stream.figures(partition)["ranks_per_user"] <= 1.1
