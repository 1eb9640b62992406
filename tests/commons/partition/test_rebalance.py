from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.partition import imbalance, lower_bound, rebalance, refine, refined
from tests.commons.partition.checks import (
    SLACK,
    as_lists,
    check_partition,
    is_even,
    is_no_worse,
    part_of,
    parts_at,
)
from tests.commons.partition.drawn_workloads import (
    ARRAYS,
    SMALL,
    TOLERANCES,
    WORKLOADS,
    costs,
    samples_at_home,
)
from tests.commons.partition.heavy_tails import FLOPS, ROWS, draw_tokens

BYTES_PER_TOKEN = 16
any_sizes = pytest.mark.parametrize("equal_size", [True, False])


@any_sizes
@settings(max_examples=100, deadline=None)
@given(data=st.data(), drawn=samples_at_home(), tolerance=TOLERANCES)
def test_every_sample_is_in_one_part_wherever_home_is(equal_size, data, drawn, tolerance):
    workloads, home, parts = drawn
    priced = data.draw(costs(len(workloads)))
    partition = rebalance(workloads, home, parts, tolerance, equal_size=equal_size, **priced)
    check_partition(partition, len(workloads), parts, equal_size)
    assert imbalance(workloads, partition) * SLACK >= lower_bound(workloads, parts, equal_size)
    at_home = parts_at(home, parts)
    if not equal_size or is_even(at_home):
        assert is_no_worse(workloads, partition, at_home)


@any_sizes
@pytest.mark.parametrize("tolerance", [0.01, 0.1])
@settings(max_examples=100, deadline=None)
@given(data=st.data(), drawn=samples_at_home())
def test_meets_the_tolerance_or_is_near_what_refined_attains(equal_size, tolerance, data, drawn):
    workloads, home, parts = drawn
    priced = data.draw(costs(len(workloads)))
    partition = rebalance(workloads, home, parts, tolerance, equal_size=equal_size, **priced)
    bound = (1 + tolerance) * lower_bound(workloads, parts, equal_size)
    attained = (1 + 1.2 * tolerance) * imbalance(workloads, refined(workloads, parts, equal_size))
    assert imbalance(workloads, partition) <= max(bound, attained) * SLACK


@any_sizes
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_nothing_moves_within_the_tolerances(equal_size, data):
    workloads, home, parts = data.draw(samples_at_home(even=equal_size))
    tokens = data.draw(st.lists(SMALL, min_size=len(home), max_size=len(home)))
    at_home = parts_at(home, parts)
    tolerance = imbalance(workloads, at_home) / lower_bound(workloads, parts, equal_size) * SLACK - 1
    even_tokens = {"tokens": tokens, "token_tolerance": imbalance(tokens, at_home) * SLACK - 1}
    for partition in (
        refine(workloads, at_home, tolerance, equal_size),
        rebalance(workloads, home, parts, tolerance, equal_size=equal_size),
        rebalance(workloads, home, parts, tolerance, equal_size=equal_size, **even_tokens),
    ):
        assert as_lists(partition) == as_lists(at_home)


def test_samples_that_cost_nothing_stay_where_they_are():
    assert as_lists(refine([0, 0], [[0, 1], []], equal_size=False)) == [[0, 1], []]
    assert as_lists(rebalance([0, 0], [0, 0], 2, equal_size=False)) == [[0, 1], []]


@pytest.mark.parametrize("tolerance", [1.5, 30.0, 1e6])
def test_nothing_moves_within_a_large_tolerance(tolerance):
    workloads, at_home = [0.1, 0.2, 0.3, 0.4], [[0, 1, 2, 3], []]
    assert as_lists(refine(workloads, at_home, tolerance, equal_size=False)) == at_home
    assert as_lists(rebalance(workloads, [0] * 4, 2, tolerance, equal_size=False)) == at_home


@settings(max_examples=100, deadline=None)
@given(data=st.data(), workloads=WORKLOADS.filter(len))
def test_nothing_moves_with_one_row_per_part(data, workloads):
    home = data.draw(st.permutations(range(len(workloads))))
    assert part_of(rebalance(workloads, home, len(workloads))).tolist() == home


@settings(max_examples=100, deadline=None)
@given(drawn=samples_at_home(even=True, workloads=st.lists(st.just(0) | st.just(0.0), max_size=30)))
def test_nothing_moves_where_nothing_costs_anything(drawn):
    workloads, home, parts = drawn
    for equal_size in (True, False):
        assert part_of(rebalance(workloads, home, parts, equal_size=equal_size)).tolist() == list(home)


def test_sizes_are_what_moving_costs():
    def moved(sizes):
        partition = rebalance([5, 5, 1, 1], [0, 0, 1, 1], 2, sizes=sizes)
        return part_of(partition)[:2].tolist()

    assert moved([1, 9, 1, 1]) == [1, 0]
    assert moved([9, 1, 1, 1]) == [0, 1]


def test_samples_stay_in_their_node_if_they_can():
    home, workloads = [3, 3], [5, 5]
    for ranks_per_node, expected in ((None, 0), (2, 2), (4, 0)):
        partition = rebalance(workloads, home, 4, ranks_per_node=ranks_per_node, equal_size=False)
        assert sorted(part_of(partition).tolist()) == [expected, 3]


@pytest.mark.parametrize("kind", ARRAYS)
def test_kind_and_type_of_the_arguments_do_not_matter(kind):
    workloads, home, sizes = [5, 0, 17, 3, 3, 8], [0, 1, 1, 1, 0, 0], [1, 2, 3, 4, 5, 6]
    expected = as_lists(rebalance(workloads, home, 2, sizes=sizes))
    assert as_lists(rebalance(kind(workloads), kind(home), 2, sizes=kind(sizes))) == expected


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("lengths", ["lognormal", "zipf"])
def test_few_samples_and_bytes_move_for_nearly_all_that_can_be_gained(lengths, ranks):
    rng = np.random.default_rng(0)
    home = np.repeat(np.arange(ranks), ROWS)
    samples_moved, bytes_moved, worse = [], [], []
    for _ in range(10):
        tokens = draw_tokens(lengths, rng, len(home))
        workloads, sizes = FLOPS.per_sample(tokens), BYTES_PER_TOKEN * tokens
        partition = rebalance(workloads, home, ranks, sizes=sizes)
        moved = part_of(partition) != home
        samples_moved.append(moved.mean())
        bytes_moved.append(sizes[moved].sum() / sizes.sum())
        worse.append(imbalance(workloads, partition) / imbalance(workloads, refined(workloads, ranks)))
    assert np.mean(samples_moved) <= 0.2
    assert np.mean(bytes_moved) <= 0.2
    assert np.max(worse) <= 1.012


@pytest.mark.parametrize(("lengths", "share"), [("lognormal", 0.01), ("zipf", 0.08)])
def test_few_bytes_cross_nodes(lengths, share):
    rng = np.random.default_rng(0)
    home = np.repeat(np.arange(64), ROWS)
    across = {8: [], None: []}
    for _ in range(10):
        tokens = draw_tokens(lengths, rng, len(home))
        workloads, sizes = FLOPS.per_sample(tokens), BYTES_PER_TOKEN * tokens
        for ranks_per_node, shares in across.items():
            partition = rebalance(workloads, home, 64, sizes=sizes, ranks_per_node=ranks_per_node)
            crossed = part_of(partition) // 8 != home // 8
            shares.append(sizes[crossed].sum() / sizes.sum())
    assert np.mean(across[8]) <= share
    assert np.mean(across[8]) < np.mean(across[None])


@pytest.mark.parametrize("max_tokens", [None, 1.2])
@pytest.mark.parametrize("parts", [2, 64])
def test_from_one_part_light_samples_stay_and_the_others_are_balanced(parts, max_tokens):
    tokens = draw_tokens("lognormal", np.random.default_rng(0), 64 * ROWS)
    workloads, home = FLOPS.per_sample(tokens), np.zeros(len(tokens), dtype=np.int64)
    caps = {}
    if max_tokens is not None:
        caps = {"tokens": tokens, "max_tokens": int(max_tokens * tokens.sum() / parts)}
    partition = rebalance(workloads, home, parts, equal_size=False, **caps)
    check_partition(partition, len(workloads), parts, equal_size=False)
    attained = imbalance(workloads, refined(workloads, parts, equal_size=False, **caps))
    assert imbalance(workloads, partition) <= 1.02 * attained
    assert len(partition[0]) >= len(tokens) / parts
    if max_tokens is None:
        assert workloads[partition[0]].mean() < 0.6 * workloads.mean()


def test_samples_that_cost_nothing_stay_at_home():
    for home in ([0, 0], [1, 1]):
        partition = rebalance([0, 0], home, 2, equal_size=False)
        assert part_of(partition).tolist() == home


@pytest.mark.parametrize("per_node", [None, 5])
def test_the_lightest_of_the_node_come_back_where_the_heaviest_leave(per_node):
    giant, other = [1000] + 7 * [30], 5 * [60] + [40, 1, 1]
    workloads = [*giant, *(4 * other), *(5 * other)]  # of ten parts, the first five are a node
    home = np.repeat(np.arange(10), 8)
    partition = rebalance(workloads, home, 10, ranks_per_node=per_node)
    part = part_of(partition)
    assert sorted(np.array(workloads)[partition[0]]) == 7 * [1] + [1000]
    assert np.count_nonzero(part != home) == 14
    assert per_node is None or np.array_equal(part // per_node, home // per_node)


def test_what_its_node_lacks_comes_from_the_others():
    giant, other, light = [1000] + 7 * [30], 8 * [60], 5 * [60] + [40, 1, 1]
    workloads, home = [*giant, *(4 * other), *(5 * light)], np.repeat(np.arange(10), 8)
    partition = rebalance(workloads, home, 10, ranks_per_node=5)
    part = part_of(partition)
    assert sorted(np.array(workloads)[partition[0]]) == 7 * [1] + [1000]
    assert np.count_nonzero(part // 5 != home // 5) == 14
