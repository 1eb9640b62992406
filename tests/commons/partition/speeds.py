"""Problems with parts of different speeds, and checks of functions that take speeds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import strategies as st

from commons.partition import imbalance, lower_bound
from tests.commons.partition.checks import as_lists, check_partition, keeps
from tests.commons.partition.drawn_workloads import PARTS, WORKLOADS, homes

# With speeds, workloads are rounded to fewer bits than float64 has.
ROUNDING = 1 + 1e-6
SPEEDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "equal": lambda rng, n: np.ones(n),
    "one slow": lambda rng, n: np.where(np.arange(n) == rng.integers(n), 0.5, 1.0),
    "two generations": lambda rng, n: rng.choice([1.0, 1.6], n),
    "all different": lambda rng, n: rng.uniform(0.5, 2, n),
}
WRONG_SPEEDS = [
    ([1.0], r"speeds has shape \(1,\), expected one for each of 2 parts"),
    ([1.0, 0.0], r"speeds\[1\] is 0.0"),
    ([1.0, -1.0], r"speeds\[1\] is -1.0"),
    ([float("nan"), 1.0], r"speeds\[0\] is nan"),
    ([1.0, float("inf")], r"speeds\[1\] is inf"),
    ([1.0, 1e-4], "expected the fastest part to be at most 1000 times as fast"),
]


@st.composite
def problems(draw):
    """(workloads, home, speeds)"""
    workloads, num_parts = draw(WORKLOADS), draw(PARTS)
    speeds = draw(st.lists(st.floats(0.3, 3), min_size=num_parts, max_size=num_parts))
    return workloads, draw(homes(len(workloads), num_parts, False)), speeds


def check_speeds(balance: Callable[..., list[np.ndarray]], problem, equal_size: bool, unit: float) -> None:
    """Checks that parts are whole, and that equal speeds change nothing."""
    workloads, home, speeds = problem
    num_parts = len(speeds)
    partition = balance(workloads, home, num_parts, equal_size, speeds=speeds)
    steps = len(partition) // num_parts
    check_partition(partition, len(workloads), num_parts * steps, equal_size)
    if steps == 1:
        bound = lower_bound(workloads, num_parts, equal_size, speeds)
        assert imbalance(workloads, partition, speeds) * ROUNDING >= bound
    equal = balance(workloads, home, num_parts, equal_size, speeds=np.full(num_parts, unit))
    assert as_lists(equal) == as_lists(balance(workloads, home, num_parts, equal_size))


def check_limits(balance: Callable[..., list[np.ndarray]], problem, equal_size: bool, limits) -> None:
    workloads, home, speeds = problem
    try:
        partition = balance(workloads, home, len(speeds), equal_size, speeds=speeds, **limits)
    except ValueError:
        return
    assert keeps(partition, limits)


def check_wrong_speeds(balance: Callable[..., list[np.ndarray]]) -> None:
    for speeds, message in WRONG_SPEEDS:
        with pytest.raises(ValueError, match=message):
            balance([1, 2, 3], [0, 0, 1], 2, False, speeds=speeds)
