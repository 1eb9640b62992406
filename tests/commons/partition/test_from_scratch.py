from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commons.partition import imbalance, karmarkar_karp, longest_processing_time, lower_bound, refine, refined
from tests.commons.partition.checks import SLACK, as_lists, check_partition, is_no_worse, parts_at
from tests.commons.partition.drawn_workloads import PARTS, TOLERANCES, WORKLOADS, samples_at_home
from tests.commons.partition.every_function import ONE_STEP
from tests.commons.partition.heavy_tails import FLOPS, ROWS, draw_flops

every_function = pytest.mark.parametrize(
    "function", [karmarkar_karp, longest_processing_time, refined, ONE_STEP["refine"]]
)
any_sizes = pytest.mark.parametrize("equal_size", [True, False])


@settings(max_examples=100, deadline=None)
@given(workloads=WORKLOADS, parts=PARTS, equal_size=st.booleans())
def test_refined_is_no_worse_than_longest_first(workloads, parts, equal_size):
    start = longest_processing_time(workloads, parts, equal_size)
    bound = lower_bound(workloads, parts, equal_size)
    within = max(imbalance(workloads, start), bound * (1 + 1e-4))  # there it tries no other start
    assert imbalance(workloads, refined(workloads, parts, equal_size)) <= within * SLACK


@any_sizes
@settings(max_examples=100, deadline=None)
@given(data=st.data(), tolerance=TOLERANCES)
def test_refine_is_no_worse_than_its_input(equal_size, data, tolerance):
    workloads, home, parts = data.draw(samples_at_home(even=equal_size))
    start = parts_at(home, parts)
    partition = refine(workloads, start, tolerance, equal_size)
    check_partition(partition, len(workloads), parts, equal_size)
    assert is_no_worse(workloads, partition, start)


@settings(max_examples=100, deadline=None)
@given(workloads=WORKLOADS, parts=PARTS, tolerance=TOLERANCES, equal_size=st.booleans())
@example(
    workloads=[0.1, 0.1, 0.3, 0.4, 0.4, 0.5, 0.8, 0.8, 0.375, 0.3125, 0.3125, 0.4375, 0.34375, 0.296875],
    parts=5,
    tolerance=0.01,
    equal_size=True,
)
def test_refined_meets_the_tolerance_or_is_as_good_as_it_gets(workloads, parts, tolerance, equal_size):
    bound = lower_bound(workloads, parts, equal_size)
    best = imbalance(workloads, refined(workloads, parts, equal_size))
    reached = imbalance(workloads, refined(workloads, parts, equal_size, tolerance=tolerance))
    assert reached <= max((1 + tolerance) * bound, best) * SLACK


@every_function
def test_beats_the_order_of_loading_on_heavy_tails(function):
    workloads = np.random.default_rng(0).lognormal(5, 1.2, 256).clip(1, 1024) ** 2
    as_loaded = imbalance(workloads, np.split(np.arange(256), 8))
    for equal_size in (True, False):
        assert imbalance(workloads, function(workloads, 8, equal_size)) < 0.8 * as_loaded
    unequal = imbalance(workloads, function(workloads, 8, False))
    assert unequal == pytest.approx(lower_bound(workloads, 8, equal_size=False), rel=1e-3)


@any_sizes
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


@any_sizes
@pytest.mark.parametrize("rows", [8, 32])
def test_refined_halves_what_longest_first_leaves_on_short_histories(rows, equal_size):
    rng = np.random.default_rng(0)
    gaps = []
    for _ in range(10):
        workloads = FLOPS.per_sample(rng.integers(1, 400, 8 * rows))
        bound = lower_bound(workloads, 8, equal_size)
        start = longest_processing_time(workloads, 8, equal_size)
        end = refined(workloads, 8, equal_size)
        gaps.append([imbalance(workloads, partition) / bound - 1 for partition in (start, end)])
    before, after = np.mean(gaps, axis=0)
    assert after <= before / 2


@every_function
@settings(max_examples=30, deadline=None)
@given(workloads=WORKLOADS.filter(len))
def test_one_part_holds_everything_and_as_many_parts_as_samples_one_each(function, workloads):
    assert as_lists(function(workloads, 1, True)) == [list(range(len(workloads)))]
    assert [len(part) for part in function(workloads, len(workloads), True)] == [1] * len(workloads)


@pytest.mark.parametrize("function", [longest_processing_time, refined])
@pytest.mark.parametrize("parts", [2, 3, 4, 8, 13])
def test_what_costs_nothing_is_spread_evenly_when_sizes_are_free(function, parts):
    check_partition(function([0] * 64, parts, equal_size=False), 64, parts, equal_size=True)


@pytest.mark.parametrize("function", [karmarkar_karp, longest_processing_time, refined])
def test_a_giant_is_alone_when_sizes_are_free(function):
    partition = function([3, 1, 10**15, 2, 2], 3, equal_size=False)
    assert [2] in as_lists(partition)
    assert imbalance([3, 1, 10**15, 2, 2], partition) == pytest.approx(3)


def test_parts_to_refine_may_be_lists_or_tensors():
    workloads = [5, 0, 17, 3]
    expected = as_lists(refine(workloads, [np.array([0, 2]), np.array([1, 3])]))
    assert as_lists(refine(workloads, [[2, 0], [3, 1]])) == expected
    assert as_lists(refine(workloads, [torch.tensor([0, 2]), torch.tensor([1, 3])])) == expected
