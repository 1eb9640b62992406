"""`max_tokens` is kept, or what cannot be placed is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.partition import rebalance
from tests.commons.partition.checks import as_lists, check_partition, is_no_worse, keeps, parts_at
from tests.commons.partition.drawn_workloads import TOLERANCES, per_sample, samples_at_home
from tests.commons.partition.every_function import FUNCTIONS
from tests.commons.partition.internals import refine

WITH_CAPS = ["longest_processing_time", "refined", "rebalance"]
any_sizes = pytest.mark.parametrize("equal_size", [True, False])


def place(name, workloads, parts, equal_size, **limits):
    """From consecutive samples, where the function has a home."""
    home = np.arange(len(workloads)) * parts // len(workloads)
    return FUNCTIONS[name](workloads, home, parts, equal_size, **limits)


@any_sizes
@given(data=st.data(), tolerance=TOLERANCES, room=st.none() | st.integers(0, 2))
def test_refine_keeps_the_limits_of_its_input_and_is_no_worse(equal_size, data, tolerance, room):
    workloads, home, parts = data.draw(samples_at_home(even=equal_size))
    start, limits = parts_at(home, parts), {}
    if room is not None:
        tokens = np.array(data.draw(per_sample(len(home))), int)
        limits = {"tokens": tokens, "max_tokens": int(max(tokens[part].sum() for part in start)) + room}
    partition = refine(workloads, start, tolerance, equal_size, **limits)
    check_partition(partition, len(workloads), parts, equal_size)
    assert keeps(partition, limits) and is_no_worse(workloads, partition, start)


@pytest.mark.parametrize("name", WITH_CAPS)
def test_tight_caps_are_held_where_the_greedy_placement_by_workload_is_stuck(name):
    for workloads, tokens, equal_size in (
        ([10, 10, 1, 1, 1], [3, 3, 2, 2, 2], False),
        ([10, 10, 5, 5, 1, 1], [4, 2, 2, 2, 1, 1], True),
        ([1, 2, 4, 8, 16, 32], [4, 3, 2, 1, 1, 1], True),
        ([1, 2, 4, 8, 16, 32], [6, 2, 1, 1, 1, 1], False),
    ):
        limits = {"tokens": tokens, "max_tokens": 6}
        partition = place(name, workloads, 2, equal_size, **limits)
        check_partition(partition, len(workloads), 2, equal_size)
        assert keeps(partition, limits)


@any_sizes
@pytest.mark.parametrize("name", WITH_CAPS)
def test_caps_that_cannot_be_held_are_named(name, equal_size):
    for tokens, max_tokens, message in (
        ([1, 9, 2], 8, r"tokens\[1\] is 9, expected at most max_tokens=8"),
        ([5, 5, 5], 7, "max_tokens=7 .* at most 14 tokens, the samples have 15"),
        ([5, 5, 5], 8, r"max_tokens=8 .* sample \d with 5 tokens fits in none .* raise max_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            place(name, [1, 2, 3], 2, equal_size, tokens=tokens, max_tokens=max_tokens)


def test_parts_to_refine_that_break_limits_are_named():
    for partition, limits, message in (
        ([[0, 1, 2], []], {}, r"partition\[0\] has 3 samples, expected 1 to 2"),
        ([[], [0, 1, 2]], {}, r"partition\[0\] has 0 samples, expected 1 to 2"),
        ([[0, 1], [2]], {"tokens": [4, 4, 1], "max_tokens": 7}, r"partition\[0\] has 8 tokens.*max_tokens=7"),
    ):
        with pytest.raises(ValueError, match=message):
            refine([1, 2, 3], partition, **limits)


def test_a_home_that_keeps_to_the_cap_is_kept_where_nothing_else_does():
    tokens = np.array([624, 60, 316, 578, 197, 225, 56, 169, 775, 285, 588, 127])
    home = np.repeat(np.arange(4), 3)
    partition = rebalance(tokens**2, home, 4, tolerance=0.0, tokens=tokens, max_tokens=1000)
    assert max(tokens[part].sum() for part in partition) == 1000


@pytest.mark.parametrize("name", WITH_CAPS)
def test_a_cap_changes_nothing_where_it_is_far_away(name):
    rng = np.random.default_rng(0)
    workloads, tokens = rng.integers(0, 1000, 64), rng.integers(0, 100, 64)
    expected = as_lists(place(name, workloads, 4, False))
    assert as_lists(place(name, workloads, 4, False, tokens=tokens, max_tokens=10**6)) == expected
