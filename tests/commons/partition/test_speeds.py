"""Parts of different speeds: times take the place of loads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.partition import (
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
from tests.commons.partition.checks import part_of
from tests.commons.partition.drawn_workloads import caps
from tests.commons.partition.exhaustive import best_time
from tests.commons.partition.heavy_tails import DRAWN_LENGTHS as LENGTHS
from tests.commons.partition.speeds import (
    ROUNDING,
    WRONG_SPEEDS,
    check_limits,
    check_speeds,
    check_wrong_speeds,
    problems,
)

TOLERANCE = 0.01
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
    "balance_window": lambda work, home, n, even, **options: [
        part for step in balance_window(work, n, 2, equal_size=even, **options) for part in step
    ],
}


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=60, deadline=None)
@given(problem=problems(), equal_size=st.booleans(), unit=st.sampled_from([1.0, 2.0, 1e-3, 7e5]))
def test_parts_are_whole_and_equal_speeds_change_nothing(name, problem, equal_size, unit):
    check_speeds(FUNCTIONS[name], problem, equal_size, unit)


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
    limits = data.draw(caps(len(problem[0]), len(problem[2])))
    for function in ("longest_processing_time", "refined", "rebalance"):
        check_limits(FUNCTIONS[function], problem, equal_size, limits)


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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_speeds_are_named(name):
    check_wrong_speeds(FUNCTIONS[name])


@pytest.mark.parametrize(("speeds", "message"), WRONG_SPEEDS)
def test_wrong_speeds_of_an_imbalance_are_named(speeds, message):
    with pytest.raises(ValueError, match=message):
        imbalance([1, 2, 3], [[0], [1, 2]], speeds)
