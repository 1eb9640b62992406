from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.partition import balance_window, imbalance, loads, refined, step_ratios
from tests.commons.partition.checks import SLACK, check_partition
from tests.commons.partition.drawn_workloads import PARTS, WORKLOADS
from tests.commons.partition.heavy_tails import ROWS, draw_flops

RATIOS = st.sampled_from([None, 1.0, 1.25, 1.5, 2.0, 10.0])


def parts_of(window):
    return [part for step in window for part in step]


def total_time(workloads, window):
    """Returns the time of all steps, each as long as its largest load."""
    return sum(loads(workloads, step).max() for step in window)


def times_over_ideal(ranks, steps, ratio, lengths="lognormal", draws=5):
    rng = np.random.default_rng(0)
    times = []
    for _ in range(draws):
        workloads = draw_flops(lengths, rng, steps * ranks * ROWS)
        window = balance_window(workloads, ranks, steps, ratio)
        times.append(total_time(workloads, window) / (workloads.sum() / ranks))
    return np.array(times)


@given(workloads=WORKLOADS, parts=PARTS, ratio=RATIOS)
def test_one_step_is_as_good_as_refined(workloads, parts, ratio):
    (step,) = balance_window(workloads, parts, 1, ratio)
    assert imbalance(workloads, step) <= imbalance(workloads, refined(workloads, parts)) * (1 + 1e-6)


@given(workloads=WORKLOADS, parts=PARTS, steps=st.integers(1, 5))
def test_ratios_are_the_totals_of_steps_over_their_mean(workloads, parts, steps):
    window = balance_window(workloads, parts, steps)
    assert [len(step) for step in window] == [parts] * steps
    totals = np.array([loads(workloads, step).sum() for step in window])
    expected = totals / totals.mean() if totals.any() else np.ones(steps)
    np.testing.assert_allclose(step_ratios(workloads, window), expected, rtol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_takes_no_longer_than_consecutive_batches_refined_one_by_one(seed):
    rng = np.random.default_rng(seed)
    steps, parts, rows = 4, 8, 16
    size = steps * parts * rows
    for drawn in (rng.lognormal(5, 1.2, size), rng.pareto(1.1, size), rng.zipf(1.2, size).clip(1, 4096)):
        workloads = np.rint(100 * drawn)
        one_by_one = sum(
            loads(batch, refined(batch, parts)).max() for batch in workloads.reshape(steps, parts * rows)
        )
        assert total_time(workloads, balance_window(workloads, parts, steps)) <= one_by_one * 1.001


@pytest.mark.parametrize("ratio", [1.25, 1.5, 2.0])
@pytest.mark.parametrize(("ranks", "steps"), [(8, 4), (8, 8), (64, 4)])
def test_no_step_is_above_the_ratio(ranks, steps, ratio):
    rng = np.random.default_rng(0)
    for lengths in ("lognormal", "zipf") * 3:
        workloads = draw_flops(lengths, rng, steps * ranks * ROWS)
        assert workloads.max() <= ratio * workloads.sum() / steps
        assert step_ratios(workloads, balance_window(workloads, ranks, steps, ratio)).max() <= ratio


@pytest.mark.parametrize(
    ("workloads", "parts", "steps", "ratio", "equal_size"),
    [
        ([100, 100], 2, 2, 1.5, False),
        ([100, 100, 1, 1], 2, 2, 1.5, True),
        ([100] * 4, 4, 2, 1.1, False),
        ([7] * 29, 5, 5, 1.1, True),
    ],
)
def test_a_ratio_that_an_even_division_keeps_is_kept(workloads, parts, steps, ratio, equal_size):
    window = balance_window(np.array(workloads), np.int8(parts), np.int8(steps), ratio, equal_size)
    assert step_ratios(np.array(workloads), window).max() <= ratio
    sizes = [len(part) for part in parts_of(window)]
    assert sum(sizes) == len(workloads) and (not equal_size or max(sizes) - min(sizes) <= 1)


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_giants_are_divided_among_steps_where_nothing_else_keeps_the_ratio(seed, equal_size):
    rng = np.random.default_rng(seed)
    parts, steps, rows = rng.choice([2, 4, 8]), rng.choice([3, 4, 8]), rng.choice([1, 2, 8])
    count = parts * steps * rows + (0 if equal_size else rng.integers(0, parts))
    workloads = np.where(rng.random(count) < 0.15, 1000, rng.integers(1, 5, count))
    speeds = None if seed % 2 else rng.uniform(0.5, 1, parts)
    even = loads(workloads, refined(workloads, steps, equal_size))
    window = balance_window(workloads, parts, steps, 1.25, equal_size, speeds=speeds)
    ratio = step_ratios(workloads, window).max()
    assert ratio <= max(1.25, even.max() / even.mean()) * SLACK
    check_partition(parts_of(window), count, parts * steps, equal_size)


def test_a_giant_above_the_ratio_is_not_refused_but_reported():
    workloads = np.ones(256)
    workloads[100] = 10_000
    window = balance_window(workloads, 8, 4, max_step_ratio=1.5)
    check_partition(parts_of(window), 256, 32, equal_size=True)
    ratios = step_ratios(workloads, window)
    assert ratios.max() == ratios[0] > 3.9
    assert 100 in np.concatenate(window[0])


@pytest.mark.parametrize(
    ("ranks", "steps", "ratio", "expected"),
    [(8, 8, None, 1.01), (8, 8, 1.5, 1.05), (64, 4, None, 1.01), (64, 4, 1.5, 1.1)],
)
def test_heavy_tails_reach_nearly_the_ideal_time(ranks, steps, ratio, expected):
    assert times_over_ideal(ranks, steps, ratio).mean() <= expected


def test_giants_that_are_alike_share_a_step():
    window = balance_window([1, 10, 10, 1, 10, 10, 10, 10], 2, 2)
    assert total_time(np.array([1, 10, 10, 1, 10, 10, 10, 10]), window) == 31


@pytest.mark.parametrize("lengths", ["lognormal", "zipf"])
@pytest.mark.parametrize("ratio", [None, 1.25, 1.5, 2.0])
@pytest.mark.parametrize("ranks", [8, 64])
def test_eight_steps_are_no_worse_than_four(ranks, ratio, lengths):
    four, eight = (times_over_ideal(ranks, steps, ratio, lengths).mean() for steps in (4, 8))
    assert eight <= four + 1e-3


@pytest.mark.parametrize(
    ("workloads", "shortest"),
    [([], 0), ([5], 5), ([0] * 50, 0), ([7] * 48, 4 * 28), ([0] * 49 + [10**15], 10**15)],
)
@pytest.mark.parametrize("ratio", [None, 1.25, 1.5])
def test_corner_cases_take_as_little_time_as_can_be(workloads, shortest, ratio):
    window = balance_window(workloads, 3, 4, ratio)
    assert total_time(workloads, window) == pytest.approx(shortest)
    assert step_ratios(workloads, window).mean() == pytest.approx(1)
