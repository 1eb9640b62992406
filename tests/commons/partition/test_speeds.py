"""Parts of different speeds: times take the place of loads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.partition import balance_window, imbalance, loads
from tests.commons.partition.drawn_workloads import caps
from tests.commons.partition.every_function import FUNCTIONS, WINDOW
from tests.commons.partition.heavy_tails import LENGTHS
from tests.commons.partition.speeds import (
    WRONG_SPEEDS,
    check_limits,
    check_speeds,
    check_wrong_speeds,
    problems,
)


@pytest.mark.parametrize("name", FUNCTIONS | WINDOW)
@settings(max_examples=60, deadline=None)
@given(problem=problems(), equal_size=st.booleans(), unit=st.sampled_from([1.0, 2.0, 1e-3, 7e5]))
def test_parts_are_whole_and_equal_speeds_change_nothing(name, problem, equal_size, unit):
    check_speeds((FUNCTIONS | WINDOW)[name], problem, equal_size, unit)


@settings(max_examples=150, deadline=None)
@given(problem=problems(), data=st.data(), equal_size=st.booleans())
def test_limits_are_kept(problem, data, equal_size):
    limits = data.draw(caps(len(problem[0]), len(problem[2])))
    for function in ("longest_processing_time", "refined", "rebalance"):
        check_limits(FUNCTIONS[function], problem, equal_size, limits)


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


@pytest.mark.parametrize("name", FUNCTIONS | WINDOW)
def test_wrong_speeds_are_named(name):
    check_wrong_speeds((FUNCTIONS | WINDOW)[name])


@pytest.mark.parametrize(("speeds", "message"), WRONG_SPEEDS)
def test_wrong_speeds_of_an_imbalance_are_named(speeds, message):
    with pytest.raises(ValueError, match=message):
        imbalance([1, 2, 3], [[0], [1, 2]], speeds)
