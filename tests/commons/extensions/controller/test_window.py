"""Several steps that are planned together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.extensions.controller import balance_window, step_ratios
from commons.partition import imbalance, karmarkar_karp, refined
from tests.commons.partition.arguments import check_kinds_of_arguments, check_wrong_arguments
from tests.commons.partition.checks import ROUNDING, SLACK, check_partition
from tests.commons.partition.drawn_workloads import PARTS, WORKLOADS
from tests.commons.partition.every_function import (
    Function,
    check_many_workloads,
    check_properties,
    problems_of,
)
from tests.commons.partition.heavy_tails import LENGTHS, ROWS, draw_flops
from tests.commons.partition.internals import loads
from tests.commons.partition.recorded_plans import checksum, problems

NUM_STEPS = 3


def parts_of(window):
    return [part for step in window for part in step]


WINDOW = Function(
    lambda workloads, home, parts, equal_size, **options: parts_of(
        balance_window(workloads, parts, NUM_STEPS, equal_size=equal_size, **options)
    ),
    frozenset(("speeds", "max_step_ratio")),
    parts_each=NUM_STEPS,
)


@given(problem=problems_of(WINDOW))
def test_each_sample_once_within_limits_whatever_the_unit(problem):
    check_properties(WINDOW, problem)


def test_wrong_arguments_are_named_and_their_kind_does_not_matter():
    check_wrong_arguments(balance_window)
    check_kinds_of_arguments(balance_window)
    check_wrong_arguments(step_ratios)
    check_kinds_of_arguments(step_ratios)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 1953833730), ({"max_step_ratio": 1.25, "equal_size": False}, 1497771161)],
)
def test_plans_are_the_same_on_every_machine(options, expected):
    windows = (balance_window(workloads, parts, 2, **options) for workloads, parts, _, _ in problems())
    assert checksum(step for window in windows for step in window) == expected


def total_time(workloads, window, speeds=1):
    """Returns the time of all steps, each as long as its slowest part takes."""
    return sum((loads(workloads, step) / speeds).max() for step in window)


def time_over_ideal(ranks, steps, ratio, lengths, draws):
    rng = np.random.default_rng(0)
    times = []
    for _ in range(draws):
        workloads = draw_flops(lengths, rng, steps * ranks * ROWS)
        window = balance_window(workloads, ranks, steps, ratio)
        times.append(total_time(workloads, window) / (workloads.sum() / ranks))
        if ratio is not None:
            assert workloads.max() <= ratio * workloads.sum() / steps
            assert step_ratios(workloads, window).max() <= ratio
    return np.mean(times)


@given(
    workloads=WORKLOADS,
    parts=PARTS,
    ratio=st.sampled_from([None, 1.0, 1.25, 1.5, 2.0, 10.0]),
    equal_size=st.booleans(),
)
def test_one_step_is_as_good_as_refined_and_differencing(workloads, parts, ratio, equal_size):
    (step,) = balance_window(workloads, parts, 1, ratio, equal_size)
    best = imbalance(workloads, refined(workloads, parts, equal_size))
    assert imbalance(workloads, step) <= best * ROUNDING
    assert imbalance(workloads, step) <= imbalance(workloads, karmarkar_karp(workloads, parts)) * SLACK


@given(workloads=WORKLOADS, parts=PARTS, steps=st.integers(1, 5))
def test_ratios_are_the_totals_of_steps_over_their_mean(workloads, parts, steps):
    window = balance_window(workloads, parts, steps)
    totals = np.array([loads(workloads, step).sum() for step in window])
    expected = totals / totals.mean() if totals.any() else np.ones(steps)
    np.testing.assert_allclose(step_ratios(workloads, window), expected, rtol=1e-12)


@pytest.mark.parametrize("ratio", [None, 1.5])
def test_takes_less_time_if_it_knows_the_speeds(ratio):
    rng = np.random.default_rng(0)
    speeds = np.where(np.arange(8) == 3, 0.5, 1.0)
    times = {False: 0.0, True: 0.0}
    for _ in range(20):
        workloads = LENGTHS["lognormal"](rng, 8 * 16 * 4) ** 2
        for knows in times:
            told = speeds if knows else None
            window = balance_window(workloads, 8, 4, ratio, equal_size=False, speeds=told)
            times[knows] += total_time(workloads, window, speeds)
    assert times[True] < 0.75 * times[False]


@pytest.mark.parametrize("equal_size", [True, False])
def test_giants_are_divided_among_steps_where_nothing_else_keeps_the_ratio(equal_size):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        parts, steps, rows = rng.choice([2, 4, 8]), rng.choice([3, 4, 8]), rng.choice([1, 2, 8])
        count = parts * steps * rows + (0 if equal_size else rng.integers(0, parts))
        workloads = np.where(rng.random(count) < 0.15, 1000, rng.integers(1, 5, count))
        speeds = None if seed % 2 else rng.uniform(0.5, 1, parts)
        even = loads(workloads, refined(workloads, steps, equal_size))
        window = balance_window(workloads, parts, steps, 1.25, equal_size, speeds=speeds)
        ratio = step_ratios(workloads, window).max()
        assert ratio <= max(1.25, even.max() / even.mean()) * SLACK, seed
        check_partition(parts_of(window), count, parts * steps, equal_size)


@pytest.mark.parametrize("lengths", ["lognormal", "zipf"])
@pytest.mark.parametrize("ratio", [None, 1.25, 1.5])
def test_no_step_is_above_the_ratio_and_eight_are_no_worse_than_four(ratio, lengths):
    for ranks in (8, 64):
        four, eight = (time_over_ideal(ranks, steps, ratio, lengths, 64 // ranks) for steps in (4, 8))
        assert eight <= four + 1e-3, ranks
        if lengths == "lognormal" and ratio in (None, 1.5):
            assert (eight if ranks == 8 else four) <= (1.01 if ratio is None else 1.05 if ranks == 8 else 1.1)


@pytest.mark.parametrize("ratio", [None, 1.25, 1.5])
def test_corner_cases_take_as_little_time_as_can_be(ratio):
    corners = ([], 0), ([5], 5), ([0] * 50, 0), ([7] * 48, 4 * 28), ([0] * 49 + [10**15], 10**15)
    for workloads, shortest in corners:
        window = balance_window(workloads, 3, 4, ratio)
        assert total_time(workloads, window) == pytest.approx(shortest)
        assert step_ratios(workloads, window).mean() == pytest.approx(1)


def test_many_workloads_of_1e15_do_not_overflow():
    check_many_workloads(WINDOW)
