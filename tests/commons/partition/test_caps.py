from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from commons.partition import longest_processing_time, rebalance, refine, refined
from tests.commons.partition.checks import (
    as_lists,
    check_partition,
    is_even,
    is_no_worse,
    keeps,
    or_none,
    parts_at,
)
from tests.commons.partition.drawn_workloads import PARTS, TOLERANCES, WORKLOADS, caps, costs, samples_at_home


def rebalance_as_loaded(workloads, num_partitions, equal_size=True, **limits):
    """`rebalance` in the form of the others, from consecutive samples."""
    home = np.arange(len(workloads)) * num_partitions // max(len(workloads), 1)
    return rebalance(workloads, home, num_partitions, equal_size=equal_size, **limits)


every_function = pytest.mark.parametrize("function", [longest_processing_time, refined, rebalance_as_loaded])
any_sizes = pytest.mark.parametrize("equal_size", [True, False])


@every_function
@settings(max_examples=100, deadline=None)
@given(data=st.data(), workloads=WORKLOADS, parts=PARTS, equal_size=st.booleans())
def test_what_is_returned_keeps_to_the_caps(function, data, workloads, parts, equal_size):
    limits = data.draw(caps(len(workloads), parts))
    partition = or_none(function, workloads, parts, equal_size, **limits)
    assume(partition is not None)
    check_partition(partition, len(workloads), parts, equal_size)
    assert keeps(partition, limits)


@any_sizes
@settings(max_examples=100, deadline=None)
@given(data=st.data(), drawn=samples_at_home(), tolerance=TOLERANCES)
def test_rebalance_keeps_to_the_caps_from_any_home(equal_size, data, drawn, tolerance):
    workloads, home, parts = drawn
    limits, priced = data.draw(caps(len(workloads), parts)), data.draw(costs(len(workloads)))
    arguments = {"equal_size": equal_size, **priced, **limits}
    at_home = parts_at(home, parts)
    home_is_allowed = keeps(at_home, limits) and (not equal_size or is_even(at_home))
    partition = or_none(rebalance, workloads, home, parts, tolerance, **arguments)
    assert partition is not None or not home_is_allowed
    assume(partition is not None)
    check_partition(partition, len(workloads), parts, equal_size)
    assert keeps(partition, limits)
    assert not home_is_allowed or is_no_worse(workloads, partition, at_home)


@any_sizes
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_refine_keeps_to_the_caps_that_its_input_keeps(equal_size, data):
    workloads, home, parts = data.draw(samples_at_home(even=equal_size))
    start = parts_at(home, parts)
    tokens = np.array(data.draw(st.lists(st.integers(0, 50), min_size=len(home), max_size=len(home))), int)
    limits = {
        "tokens": tokens,
        "max_tokens": int(max(tokens[part].sum() for part in start)) + data.draw(st.integers(0, 2)),
    }
    partition = refine(workloads, start, equal_size=equal_size, **limits)
    check_partition(partition, len(workloads), parts, equal_size)
    assert keeps(partition, limits)
    assert is_no_worse(workloads, partition, start)


@every_function
@pytest.mark.parametrize(
    ("workloads", "tokens", "equal_size"),
    [
        ([10, 10, 1, 1, 1], [3, 3, 2, 2, 2], False),
        ([10, 10, 5, 5, 1, 1], [4, 2, 2, 2, 1, 1], True),
        ([1, 2, 4, 8, 16, 32], [4, 3, 2, 1, 1, 1], True),
        ([1, 2, 4, 8, 16, 32], [6, 2, 1, 1, 1, 1], False),
    ],
)
def test_tight_caps_are_held_where_the_greedy_placement_by_workload_is_stuck(
    function, workloads, tokens, equal_size
):
    limits = {"tokens": tokens, "max_tokens": 6}
    partition = function(workloads, 2, equal_size, **limits)
    check_partition(partition, len(workloads), 2, equal_size)
    assert keeps(partition, limits)


@every_function
def test_a_cap_changes_nothing_where_it_is_far_away(function):
    rng = np.random.default_rng(0)
    workloads, tokens = rng.integers(0, 1000, 64), rng.integers(0, 100, 64)
    expected = as_lists(function(workloads, 4, False))
    for max_tokens in (10**6, 2**70):
        limits = {"tokens": tokens, "max_tokens": max_tokens}
        assert as_lists(function(workloads, 4, False, **limits)) == expected


def test_a_home_that_keeps_to_the_cap_is_kept_where_nothing_else_does():
    tokens = np.array([624, 60, 316, 578, 197, 225, 56, 169, 775, 285, 588, 127])
    home = np.repeat(np.arange(4), 3)
    partition = rebalance(tokens**2, home, 4, tolerance=0.0, tokens=tokens, max_tokens=1000)
    assert max(tokens[part].sum() for part in partition) == 1000


def test_refine_makes_the_one_swap_that_reaches_the_bound():
    assert as_lists(refine([10001, 9999, 10000, 10000], [[0, 2], [1, 3]])) in (
        [[0, 1], [2, 3]],
        [[2, 3], [0, 1]],
    )
