from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from commons.partition import lower_bound
from tests.commons.partition.checks import SLACK
from tests.commons.partition.drawn_workloads import PARTS, WORKLOADS
from tests.commons.partition.exhaustive import best_load


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("largest", [3, 20, 1000])
def test_no_partition_is_below_the_bound(equal_size, largest):
    rng = np.random.default_rng(largest)
    for _ in range(300):
        num_parts, num_samples = rng.integers(1, 4), rng.integers(1, 9)
        workloads = rng.integers(0, largest, num_samples, endpoint=True)
        best = best_load(workloads, int(num_parts), equal_size, {})
        bound = lower_bound(workloads, int(num_parts), equal_size) * workloads.sum() / num_parts
        assert bound <= best * SLACK, (workloads, num_parts)


@given(workloads=WORKLOADS, parts=PARTS)
def test_is_at_least_the_mean_and_the_largest_sample_with_its_lightest_companions(workloads, parts):
    descending = -np.sort(-np.array(workloads, dtype=np.float64))
    mean = descending.sum() / parts
    if mean == 0:
        assert lower_bound(workloads, parts) == lower_bound(workloads, parts, equal_size=False) == 1
        return
    companions = max(len(descending) // parts - 1, 0)
    with_companions = descending[0] + descending[len(descending) - companions :].sum()
    assert lower_bound(workloads, parts, equal_size=False) * SLACK >= max(1, descending[0] / mean)
    assert lower_bound(workloads, parts, equal_size=True) * SLACK >= max(1, with_companions / mean)


@given(workloads=WORKLOADS, parts=PARTS)
def test_freedom_of_sizes_does_not_raise_it(workloads, parts):
    free = lower_bound(workloads, parts, equal_size=False)
    assert 1 <= free <= lower_bound(workloads, parts, equal_size=True) <= parts * SLACK


@pytest.mark.parametrize(
    ("workloads", "parts", "equal_size", "largest_load"),
    [
        ([10, 1, 1, 1], 2, False, 10),
        ([10, 1, 1, 1], 2, True, 11),
        ([6, 6, 6], 2, False, 12),
        ([5, 5, 5, 1, 1, 1], 2, False, 10),
        ([5, 5, 5, 1, 1, 1], 2, True, 11),
        # Two of the three parts hold four of the five largest.
        ([7, 7, 5, 5, 5], 3, False, 11),
        ([7, 7, 5, 5, 5, 1, 1, 1, 1], 3, True, 12),
    ],
)
def test_giants_that_have_to_share_a_part_raise_it(workloads, parts, equal_size, largest_load):
    expected = largest_load * parts / sum(workloads)
    assert lower_bound(workloads, parts, equal_size) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [1e-300, 0.1, 1e12])
def test_does_not_depend_on_the_unit(scale):
    workloads = np.array([7, 7, 5, 5, 5, 1, 1, 1, 1])
    for equal_size in (True, False):
        expected = lower_bound(workloads, 3, equal_size)
        assert lower_bound(workloads * scale, 3, equal_size) == pytest.approx(expected)
