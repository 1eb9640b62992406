"""Groups of samples that belong together."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.partition.user_streams import ORDERS, USERS, draw
from commons.partition import imbalance, karmarkar_karp, lower_bound, rebalance
from tests.commons.partition.checks import SLACK, as_lists, check_partition, keeps, part_of
from tests.commons.partition.drawn_workloads import PARTS, WORKLOADS, caps, samples_at_home
from tests.commons.partition.every_function import check_alike_in_other_processes, check_conserved
from tests.commons.partition.heavy_tails import FLOPS
from tests.commons.partition.speeds import check_limits, check_speeds, check_wrong_speeds, problems

PER_USER, ROWS, TOLERANCE = 4, 32, 0.01
LENGTHS = {
    "20 to 200": lambda rng, users: rng.integers(20, 201, users),
    "lognormal": lambda rng, users: rng.lognormal(5, 1.2, users).clip(1, 4096).astype(np.int64),
}


def stream(lengths, ranks, rng):
    """(FLOPs, users, ids of each sample, home) of user-major samples: those of a user share 90% of their
    ids."""
    length = LENGTHS[lengths](rng, ranks * ROWS // PER_USER)
    user = np.repeat(np.arange(len(length)), PER_USER)
    own = np.rint(0.1 * length).astype(np.int64)[user]
    next_id = np.cumsum(length + PER_USER * own[::PER_USER])[user]
    ids = []
    for sample, (last, new) in enumerate(zip(next_id, own, strict=True)):
        first_own = last - (sample % PER_USER + 1) * new
        shared = np.arange(last - PER_USER * new - length[user[sample]] + new, last - PER_USER * new)
        ids.append(np.concatenate([shared, np.arange(first_own, first_own + new)]))
    return FLOPS.per_sample(2 * length[user] + 1), user, ids, np.repeat(np.arange(ranks), ROWS)


def rebalance_with_groups(workloads, home, parts, equal_size, **options):
    groups = np.arange(len(workloads)) % 7 - 3
    return rebalance(workloads, home, parts, groups=groups, equal_size=equal_size, **options)


PARTITIONS = {
    "rebalance": lambda workloads, parts, equal_size: rebalance_with_groups(
        workloads, np.arange(len(workloads)) % parts, parts, equal_size
    )
}


@settings(max_examples=80, deadline=None)
@given(workloads=WORKLOADS, parts=PARTS, equal_size=st.booleans(), doublings=st.integers(1, 40))
def test_every_sample_is_in_one_part_whatever_the_unit(workloads, parts, equal_size, doublings):
    check_conserved(PARTITIONS["rebalance"], workloads, parts, equal_size, doublings, parts)


def test_other_processes_and_hash_seeds_reach_the_same_partition():
    check_alike_in_other_processes(__name__, "PARTITIONS")


@given(data=st.data(), problem=problems(), equal_size=st.booleans(), unit=st.sampled_from([1.0, 1e-3, 7e5]))
def test_speeds_and_limits_hold_with_groups(data, problem, equal_size, unit):
    check_speeds(rebalance_with_groups, problem, equal_size, unit)
    limits = data.draw(caps(len(problem[0]), len(problem[2])))
    check_limits(rebalance_with_groups, problem, equal_size, limits)


def test_wrong_speeds_are_named():
    check_wrong_speeds(rebalance_with_groups)


def unique_ids(ids, partition):
    return np.array([len(np.unique(np.concatenate([ids[sample] for sample in part]))) for part in partition])


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_few_ids_are_looked_up_twice(lengths, ranks):
    rng = np.random.default_rng(0)
    ratios, ratios_of_most, ratios_alone = [], [], []
    for _ in range(64 // ranks):
        workloads, user, ids, home = stream(lengths, ranks, rng)
        before = unique_ids(ids, np.split(np.arange(len(home)), ranks))
        partition = rebalance(workloads, home, ranks, TOLERANCE, groups=user)
        assert imbalance(workloads, partition) <= (1 + TOLERANCE) * lower_bound(workloads, ranks) * SLACK
        after = unique_ids(ids, partition)
        alone = unique_ids(ids, rebalance(workloads, home, ranks, TOLERANCE))
        ratios.append(after.mean() / before.mean())
        ratios_alone.append(alone.mean() / before.mean())
        ratios_of_most.append(after.max() / before.max())
    assert np.mean(ratios_of_most) <= 1.05
    assert np.mean(ratios) <= (1.02 if lengths == "20 to 200" else np.mean(ratios_alone))


def test_scattered_groups_come_together():
    rng = np.random.default_rng(0)
    workloads, user, _, home = stream("20 to 200", 8, rng)
    shuffled = rng.permutation(len(home))
    workloads, user = workloads[shuffled], user[shuffled]
    part = part_of(rebalance(workloads, home, 8, TOLERANCE, groups=user))
    parts_of_users = [len(np.unique(part[user == number])) for number in np.unique(user)]
    assert np.mean(parts_of_users) <= 1.1


@settings(max_examples=200, deadline=None)
@given(data=st.data(), equal_size=st.booleans())
def test_balance_and_limits_are_as_without_groups(data, equal_size):
    workloads, home, parts = data.draw(samples_at_home())
    group = st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1)
    groups = np.array(data.draw(st.lists(group, min_size=len(home), max_size=len(home))), dtype=np.int64)
    limits = data.draw(st.just({}) | caps(len(workloads), parts))
    try:
        alone = rebalance(workloads, home, parts, TOLERANCE, equal_size=equal_size, **limits)
    except ValueError:
        return
    partition = rebalance(workloads, home, parts, TOLERANCE, groups=groups, equal_size=equal_size, **limits)
    check_partition(partition, len(workloads), parts, equal_size)
    assert keeps(partition, limits)
    bound = lower_bound(workloads, parts, equal_size)
    assert (
        imbalance(workloads, partition) <= max(imbalance(workloads, alone), (1 + TOLERANCE) * bound) * SLACK
    )
    if not limits:
        peers = imbalance(workloads, karmarkar_karp(workloads, parts))
        assert imbalance(workloads, partition) <= max(peers, (1 + TOLERANCE) * bound) * SLACK


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_labels_of_groups_do_not_matter(data):
    workloads, home, parts = data.draw(samples_at_home())
    groups = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(home), max_size=len(home))), int)
    relabeled = np.array(data.draw(st.permutations(range(0, 60, 10))))[groups]
    given_order = rebalance(workloads, home, parts, groups=groups)
    assert as_lists(rebalance(workloads, home, parts, groups=relabeled)) == as_lists(given_order)


def test_parts_with_equal_loads_above_the_target_are_leveled():
    workloads = [5e8, 0, 1e9, 1e9, 9, 5e8, 0, 1, 1, 5e8, 5e8, 9, 0]
    home, groups = [0] * 5 + [1] * 4 + [2] * 4, [4, 5, 4, 4, 6, 5, 5, 2, 6, 2, 5, 3, 5]
    partition = rebalance(workloads, home, 3, TOLERANCE, groups=groups)
    assert imbalance(workloads, partition) <= imbalance(workloads, karmarkar_karp(workloads, 3)) * SLACK


def test_limits_that_only_home_keeps_to_are_kept_with_groups():
    tokens, home = [3, 4, 7, 7, 4, 5, 4], [1, 0, 1, 1, 0, 0, 0]
    workloads, groups = [5, 4, 0, 2, 4, 5, 0], [1, 2, 0, 1, 0, 0, 1]
    partition = rebalance(workloads, home, 2, groups=groups, tokens=tokens, max_tokens=17)
    assert keeps(partition, {"tokens": tokens, "max_tokens": 17})


def cpu_seconds(workloads, home, ranks, groups):
    rebalance(workloads[:8], home[:8] % 4, 4, groups=groups[:8])  # compiles
    started = time.process_time()
    rebalance(workloads, home, ranks, TOLERANCE, groups=groups)
    return time.process_time() - started


@pytest.mark.parametrize("users", USERS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("ranks", "rows"), [(8, 32), (64, 32), (8, 512)])
def test_no_stream_takes_a_long_search(users, order, ranks, rows):
    stream = draw(ranks, rows, users, "lognormal", order, seed=0)
    assert cpu_seconds(stream.workloads, stream.home, ranks, stream.user) < 1  # usually 1 to 40 ms


def test_a_group_of_most_samples_takes_no_long_search():
    rng = np.random.default_rng(0)
    workloads, home = rng.lognormal(5, 1.2, 64 * ROWS), np.repeat(np.arange(64), ROWS)
    assert cpu_seconds(workloads, home, 64, np.zeros(len(home), dtype=np.int64)) < 1


def test_users_with_hundreds_of_samples_are_on_few_ranks_if_copies_are_worth_it():
    stream = draw(8, 1024, "386 each", "2048", "dealt", seed=0)

    def figures(moves_per_copy):
        return stream.figures(
            rebalance(stream.workloads, stream.home, 8, groups=stream.user, moves_per_copy=moves_per_copy)
        )

    assert figures(64)["unique_ids"] <= 0.25
    dealt = figures(10)  # a user has 48 samples on each rank
    assert dealt["unique_ids"] == 1 and dealt["moved"] < 0.01


@pytest.mark.parametrize("moves_per_copy", [-1, 1001, np.nan])
def test_moves_per_copy_are_a_bounded_number(moves_per_copy):
    with pytest.raises(ValueError, match=r"moves_per_copy is \S+, expected a number from 0 to 1000"):
        rebalance([1, 2, 3], [0, 0, 1], 2, groups=[0, 0, 1], moves_per_copy=moves_per_copy)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("equal_size", [True, False])
def test_users_stay_on_one_rank_where_ranks_have_many_rows(order, equal_size):
    for users in USERS:
        stream = draw(8, 512, users, "lognormal", order, seed=0)
        partition = rebalance(
            stream.workloads, stream.home, 8, sizes=stream.sizes, groups=stream.user, equal_size=equal_size
        )
        bound = lower_bound(stream.workloads, 8, equal_size)
        assert imbalance(stream.workloads, partition) <= (1 + TOLERANCE) * bound * SLACK
        assert stream.figures(partition)["ranks_per_user"] <= 1.1


@pytest.mark.parametrize("groups", [[1, 2], [[1, 2, 3]], [0.5, 1.0, 2.0], ["a", "b", "c"]])
def test_groups_are_one_integer_per_sample(groups):
    with pytest.raises(ValueError, match=r"groups has shape .* expected one integer for each of 3 samples"):
        rebalance([1, 2, 3], [0, 0, 1], 2, groups=groups)
