"""Parts of different speeds: times take the place of loads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.partition import (
    balance_micro_batches,
    balance_window,
    imbalance,
    karmarkar_karp,
    loads,
    longest_processing_time,
    lower_bound,
    rebalance,
    refine,
    refined,
)
from tests.commons.partition.checks import as_lists, check_partition, keeps, part_of
from tests.commons.partition.drawn_workloads import PARTS, WORKLOADS, caps, homes
from tests.commons.partition.exhaustive import best_time
from tests.commons.partition.test_never_worse import LENGTHS

TOLERANCE = 0.01
# With speeds, workloads are rounded to fewer bits than float64 has.
ROUNDING = 1 + 1e-6
SPEEDS = {
    "one slow": lambda rng, n: np.where(np.arange(n) == rng.integers(n), 0.5, 1.0),
    "two generations": lambda rng, n: rng.choice([1.0, 1.6], n),
    "all different": lambda rng, n: rng.uniform(0.5, 2, n),
}
# From (workloads, home, number of parts, equal sizes, options).
FUNCTIONS = {
    "karmarkar_karp": lambda work, home, n, even, **options: karmarkar_karp(work, n, even, **options),
    "longest_processing_time": lambda work, home, n, even, **options: longest_processing_time(
        work, n, even, **options
    ),
    "refined": lambda work, home, n, even, **options: refined(work, n, even, **options),
    "refine": lambda work, home, n, even, **options: refine(
        work, karmarkar_karp(work, n, even), equal_size=even, **options
    ),
    "rebalance": lambda work, home, n, even, **options: rebalance(work, home, n, equal_size=even, **options),
    "rebalance with groups": lambda work, home, n, even, **options: rebalance(
        work, home, n, groups=np.arange(len(work)) // 3, equal_size=even, **options
    ),
    "balance_micro_batches": lambda work, home, n, even, **options: [
        np.sort(np.concatenate(of_rank))
        for of_rank in balance_micro_batches(work, np.ones(len(work)), n, 1_000, even, **options)
    ],
    "balance_window": lambda work, home, n, even, **options: [
        part for step in balance_window(work, n, 2, equal_size=even, **options) for part in step
    ],
}


@st.composite
def problems(draw):
    """(workloads, home, speeds)"""
    workloads, num_parts = draw(WORKLOADS), draw(PARTS)
    speeds = draw(st.lists(st.floats(0.3, 3), min_size=num_parts, max_size=num_parts))
    return workloads, draw(homes(len(workloads), num_parts, False)), speeds


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=60, deadline=None)
@given(problem=problems(), equal_size=st.booleans(), unit=st.sampled_from([1.0, 2.0, 1e-3, 7e5]))
def test_parts_are_whole_and_equal_speeds_change_nothing(name, problem, equal_size, unit):
    workloads, home, speeds = problem
    num_parts = len(speeds)
    balance = FUNCTIONS[name]
    partition = balance(workloads, home, num_parts, equal_size, speeds=speeds)
    steps = len(partition) // num_parts
    check_partition(partition, len(workloads), num_parts * steps, equal_size)
    if steps == 1:
        bound = lower_bound(workloads, num_parts, equal_size, speeds)
        assert imbalance(workloads, partition, speeds) * ROUNDING >= bound
    equal = balance(workloads, home, num_parts, equal_size, speeds=np.full(num_parts, unit))
    assert as_lists(equal) == as_lists(balance(workloads, home, num_parts, equal_size))


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("speeds_of", SPEEDS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_no_draw_is_worse_than_differencing_with_the_heaviest_part_on_the_fastest(
    lengths, speeds_of, equal_size
):
    rng = np.random.default_rng(0)
    for draw in range(100):
        ranks, rows = int(rng.integers(2, 65)), int(rng.integers(2, 33))
        workloads = LENGTHS[lengths](rng, ranks * rows).astype(np.int64) ** 2
        speeds = SPEEDS[speeds_of](rng, ranks)
        peers = imbalance(workloads, karmarkar_karp(workloads, ranks, speeds=speeds), speeds)
        bound = lower_bound(workloads, ranks, equal_size, speeds)
        case = f"draw {draw}: {ranks} ranks of {rows} rows"
        found = imbalance(workloads, refined(workloads, ranks, equal_size, speeds=speeds), speeds)
        assert bound <= found * ROUNDING and found <= peers * ROUNDING, case
        home = np.repeat(np.arange(ranks), rows)
        moved = rebalance(workloads, home, ranks, TOLERANCE, equal_size=equal_size, speeds=speeds)
        assert imbalance(workloads, moved, speeds) <= max(peers, (1 + TOLERANCE) * bound) * ROUNDING, case


@pytest.mark.parametrize("equal_size", [True, False])
def test_rebalancing_is_never_worse_than_a_good_home_under_its_own_limits(equal_size):
    rng = np.random.default_rng(0)
    for draw in range(600):
        ranks, rows = int(rng.integers(2, 9)), int(rng.integers(1, 7))
        workloads, tokens = rng.integers(1, rng.choice([5, 100]), (2, ranks * rows))
        speeds = rng.uniform(0.3, 3, ranks)
        at_home = refined(workloads, ranks, equal_size, speeds=speeds)
        moved = rebalance(
            workloads,
            part_of(at_home),
            ranks,
            tolerance=0.0,
            equal_size=equal_size,
            tokens=tokens,
            max_tokens=int(loads(tokens, at_home).max()),
            speeds=speeds,
        )
        times = [imbalance(workloads, partition, speeds) for partition in (moved, at_home)]
        assert times[0] <= times[1] * ROUNDING, f"draw {draw}"


@settings(max_examples=150, deadline=None)
@given(problem=problems(), data=st.data(), equal_size=st.booleans())
def test_limits_are_kept(problem, data, equal_size):
    workloads, home, speeds = problem
    limits = data.draw(caps(len(workloads), len(speeds)))
    for function in ("longest_processing_time", "refined", "rebalance", "rebalance with groups"):
        try:
            partition = FUNCTIONS[function](workloads, home, len(speeds), equal_size, speeds=speeds, **limits)
        except ValueError:
            continue
        assert keeps(partition, limits)


@pytest.mark.parametrize("equal_size", [True, False])
def test_refined_is_close_to_the_best_there_is(equal_size):
    rng = np.random.default_rng(0)
    gaps = []
    for draw in range(300):
        num_samples, num_parts = int(rng.integers(1, 9)), int(rng.integers(2, 4))
        workloads = (
            rng.integers(1, 100, num_samples) if draw % 2 else rng.zipf(1.2, num_samples).clip(1, 4096)
        )
        speeds = list(SPEEDS.values())[draw % 3](rng, num_parts)
        best = best_time(workloads, speeds, equal_size)
        found = loads(workloads, refined(workloads, num_parts, equal_size, speeds=speeds)) / speeds
        bound = lower_bound(workloads, num_parts, equal_size, speeds) * workloads.sum() / speeds.sum()
        assert bound <= best * ROUNDING
        gaps.append(100 * (found.max() / best - 1))
    print(
        f"\ngap to the optimum in %, {equal_size=}: mean {np.mean(gaps):.3f}, "
        f"99th percentile {np.percentile(gaps, 99):.3f}, max {max(gaps):.3f}"
    )
    assert min(gaps) >= -1e-3
    assert np.mean(gaps) <= 0.2


@pytest.mark.parametrize("ratio", [None, 1.5])
def test_a_window_takes_less_time_if_it_knows_the_speeds(ratio):
    rng = np.random.default_rng(0)
    speeds = np.where(np.arange(8) == 3, 0.5, 1.0)
    times = {False: 0.0, True: 0.0}
    for _ in range(20):
        workloads = LENGTHS["lognormal"](rng, 8 * 16 * 4) ** 2
        for knows in times:
            window = balance_window(
                workloads, 8, 4, ratio, equal_size=False, speeds=speeds if knows else None
            )
            times[knows] += sum((loads(workloads, step) / speeds).max() for step in window)
    assert times[True] < 0.75 * times[False]


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ([1.0], r"speeds has shape \(1,\), expected one for each of 2 parts"),
        ([1.0, 0.0], r"speeds\[1\] is 0.0"),
        ([1.0, -1.0], r"speeds\[1\] is -1.0"),
        ([float("nan"), 1.0], r"speeds\[0\] is nan"),
        ([1.0, float("inf")], r"speeds\[1\] is inf"),
        ([1.0, 1e-4], "expected the fastest part to be at most 1000 times as fast"),
    ],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_speeds_are_named(name, speeds, message):
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[name]([1, 2, 3], [0, 0, 1], 2, False, speeds=speeds)
    with pytest.raises(ValueError, match=message):
        imbalance([1, 2, 3], [[0], [1, 2]], speeds)


@pytest.mark.parametrize("max_tokens", [150, 300])
def test_fewer_micro_batches_do_not_cost_speeds(max_tokens):
    tokens = np.full(60, 10)
    fast, slow = balance_micro_batches(tokens, tokens, 2, max_tokens, equal_size=False, speeds=[1.0, 0.5])
    assert [sum(len(batch) for batch in rank) for rank in (fast, slow)] == [40, 20]
