from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.partition import imbalance, lower_bound
from tests.commons.partition.checks import SLACK, as_lists, check_partition
from tests.commons.partition.drawn_workloads import ARRAYS, PARTS, WORKLOADS
from tests.commons.partition.every_function import (
    FUNCTIONS,
    NUM_STEPS,
    ONE_STEP,
    PARTITIONS,
    check_alike_in_other_processes,
    check_conserved,
)

every_function = pytest.mark.parametrize("name", PARTITIONS)


@every_function
@settings(max_examples=80, deadline=None)
@given(workloads=WORKLOADS, parts=PARTS, equal_size=st.booleans(), doublings=st.integers(1, 40))
def test_every_sample_is_in_one_part_whatever_the_unit(name, workloads, parts, equal_size, doublings):
    num_parts = parts if name in ONE_STEP else parts * NUM_STEPS
    check_conserved(PARTITIONS[name], workloads, parts, equal_size, doublings, num_parts)


@every_function
@pytest.mark.parametrize("kind", ARRAYS)
def test_kind_and_type_of_the_workloads_do_not_matter(name, kind):
    workloads = [5, 0, 17, 3, 3, 8, 1, 2, 40]
    expected = as_lists(PARTITIONS[name](np.array(workloads, np.float64), 3, True))
    assert as_lists(PARTITIONS[name](kind(workloads), 3, True)) == expected


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("workloads", "parts"),
    [
        *(([], 3), ([5], 1), ([0, 0, 0], 2), ([4, 4, 4, 4], 4), ([10**15] * 8, 3), ([1, 10**15], 2)),
        *(([3, 4], 5), ([5, 5], 4), ([1, 10**15, 1], 2)),
    ],
)
def test_corner_cases_are_as_balanced_as_can_be(name, workloads, parts):
    most = 1.01 if name == "rebalance" else 1 + 1e-6
    for equal_size in (True, False):
        bound = lower_bound(workloads, parts, equal_size)
        for home in (0, parts - 1):
            partition = FUNCTIONS[name](workloads, [home] * len(workloads), parts, equal_size)
            assert bound / SLACK <= imbalance(workloads, partition) <= most * bound


@pytest.mark.parametrize("name", ["refined", "rebalance", "balance_window"])
def test_many_workloads_of_1e15_do_not_overflow(name):
    workloads = 1e15 * (1 + 0.1 * np.random.default_rng(0).random(100_000))
    for equal_size in (True, False):
        partition = PARTITIONS[name](workloads, 64, equal_size)
        check_partition(partition, len(workloads), len(partition), equal_size)
        assert imbalance(workloads, partition) <= 1.01 * lower_bound(workloads, len(partition), equal_size)


def test_other_processes_and_hash_seeds_reach_the_same_partition():
    check_alike_in_other_processes("tests.commons.partition.every_function", "PARTITIONS")
