import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.partition import imbalance, lower_bound
from tests.commons.partition.checks import SLACK
from tests.commons.partition.every_function import (
    FUNCTIONS,
    check_many_workloads,
    check_properties,
    problems_of,
)

every_function = pytest.mark.parametrize("name", FUNCTIONS)
CORNER_CASES = [
    *(([], 3), ([5], 1), ([0, 0, 0], 2), ([4, 4, 4, 4], 4), ([10**15] * 8, 3), ([1, 10**15], 2)),
    *(([3, 4], 5), ([5, 5], 4), ([1, 10**15, 1], 2)),
]


@every_function
@given(data=st.data())
def test_each_sample_once_within_limits_and_never_worse_than_home_whatever_the_unit(name, data):
    check_properties(FUNCTIONS[name], data.draw(problems_of(FUNCTIONS[name])))


@every_function
def test_corner_cases_are_as_balanced_as_can_be(name):
    most = 1.01 if name == "rebalance" else 1 + 1e-6
    for workloads, parts in CORNER_CASES:
        for equal_size in (True, False):
            bound = lower_bound(workloads, parts, equal_size)
            for home in (0, parts - 1):
                partition = FUNCTIONS[name](workloads, [home] * len(workloads), parts, equal_size)
                reached = imbalance(workloads, partition)
                assert bound / SLACK <= reached <= most * bound, (workloads, parts, equal_size, home)


@pytest.mark.parametrize("name", ["refined", "rebalance"])
def test_many_workloads_of_1e15_do_not_overflow(name):
    check_many_workloads(FUNCTIONS[name])
