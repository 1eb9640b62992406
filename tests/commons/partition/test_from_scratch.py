"""How close to the bound functions come that start from nothing."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from commons.partition import imbalance, karmarkar_karp, longest_processing_time, lower_bound, refined
from tests.commons.partition.checks import SLACK, check_partition
from tests.commons.partition.drawn_workloads import PARTS, TOLERANCES, WORKLOADS
from tests.commons.partition.heavy_tails import ROWS, draw_flops


@given(workloads=WORKLOADS, parts=PARTS, tolerance=TOLERANCES, equal_size=st.booleans())
@example(
    workloads=[0.1, 0.1, 0.3, 0.4, 0.4, 0.5, 0.8, 0.8, 0.375, 0.3125, 0.3125, 0.4375, 0.34375, 0.296875],
    parts=5,
    tolerance=0.01,
    equal_size=True,
)
def test_refined_meets_the_tolerance_or_is_no_worse_than_differencing(
    workloads, parts, tolerance, equal_size
):
    bound = lower_bound(workloads, parts, equal_size)
    best = imbalance(workloads, refined(workloads, parts, equal_size))
    reached = imbalance(workloads, refined(workloads, parts, equal_size, tolerance=tolerance))
    differenced = imbalance(workloads, karmarkar_karp(workloads, parts))
    assert reached <= max((1 + tolerance) * bound, differenced) * SLACK
    longest_first = imbalance(workloads, longest_processing_time(workloads, parts, equal_size))
    assert best <= max(longest_first, bound * (1 + 1e-4)) * SLACK  # there it tries no other start


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize(("lengths", "gap"), [("lognormal", 0.001), ("zipf", 0.005)])
def test_refined_is_near_the_bound_on_heavy_tails(lengths, gap, ranks, equal_size):
    rng = np.random.default_rng(0)
    gaps = []
    for _ in range(5):
        workloads = draw_flops(lengths, rng, ROWS * ranks)
        reached = imbalance(workloads, refined(workloads, ranks, equal_size))
        gaps.append(reached / lower_bound(workloads, ranks, equal_size) - 1)
    assert np.mean(gaps) <= gap


@pytest.mark.parametrize("function", [longest_processing_time, refined])
def test_what_costs_nothing_is_spread_evenly_when_sizes_are_free(function):
    for parts in (2, 3, 13):
        check_partition(function([0] * 64, parts, equal_size=False), 64, parts, equal_size=True)
