"""The lower bound, and the best partition of a few samples, found by trying all."""

import functools
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.partition import (
    imbalance,
    karmarkar_karp,
    longest_processing_time,
    lower_bound,
    rebalance,
    refined,
)
from tests.commons.partition.checks import ROUNDING, SLACK
from tests.commons.partition.heavy_tails import SPEEDS
from tests.commons.partition.internals import loads

CASES = 150
DRAWS = {
    "uniform": lambda rng, n: rng.integers(1, 100, n),
    "lognormal": lambda rng, n: rng.lognormal(5, 1.2, n).astype(np.int64) + 1,
    "zipf": lambda rng, n: rng.zipf(1.2, n).clip(1, 4096),
}


@functools.cache
def _all_partitions(num_samples: int, num_parts: int) -> np.ndarray:
    """float64 `[partitions, parts, samples]`, 1 where a sample is in a part."""
    part_of = np.array(list(product(range(num_parts), repeat=num_samples)))
    return np.stack([part_of == part for part in range(num_parts)], axis=1).astype(np.float64)


def best_time(
    workloads: np.ndarray, speeds: np.ndarray, equal_size: bool, limits: dict[str, Any] | None = None
) -> float:
    """The smallest that the largest load ÷ speed can be; infinite if no partition keeps to the limits."""
    partitions = _all_partitions(len(workloads), len(speeds))
    allowed = np.ptp(partitions.sum(axis=2), axis=1) <= (1 if equal_size else len(workloads))
    if limits:
        allowed &= (partitions @ limits["tokens"]).max(axis=1) <= limits["max_tokens"]
    return float((partitions[allowed] @ workloads / speeds).max(axis=1).min(initial=np.inf))


def tiny_case(rng, draw):
    """(workloads, number of parts)"""
    return draw(rng, rng.integers(1, 9)), int(rng.integers(2, 4))


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("speeds_of", SPEEDS)
@pytest.mark.parametrize("draw", DRAWS)
def test_refined_is_close_to_the_best_there_is(draw, speeds_of, equal_size):
    rng, is_equal, gaps = np.random.default_rng(0), speeds_of == "equal", []
    for _ in range(CASES):
        workloads, num_parts = tiny_case(rng, DRAWS[draw])
        speeds = SPEEDS[speeds_of](rng, num_parts)
        given_speeds = None if is_equal else speeds
        best = best_time(workloads, speeds, equal_size)
        found = loads(workloads, refined(workloads, num_parts, equal_size, speeds=given_speeds)) / speeds
        bound = lower_bound(workloads, num_parts, equal_size, given_speeds) * workloads.sum() / speeds.sum()
        assert bound <= best * (SLACK if is_equal else ROUNDING)
        gaps.append(100 * (found.max() / best - 1))
    assert min(gaps) >= (-1e-9 if is_equal else -1e-3)
    assert np.mean(gaps) <= (0.1 if is_equal else 0.3)


@given(workloads=st.lists(st.integers(1, 30), min_size=1, max_size=7), equal_size=st.booleans())
def test_two_parts_are_close_to_the_best_there_is(workloads, equal_size):
    best = 2 * best_time(np.array(workloads), np.ones(2), equal_size) / sum(workloads)
    # 7/6 is the proven worst ratio of differencing for two parts; with equal sizes it is 4/3.
    worst = (4 / 3 if equal_size else 7 / 6) * best
    assert imbalance(workloads, karmarkar_karp(workloads, 2, equal_size)) <= worst * SLACK


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("draw", DRAWS)
def test_caps_that_can_be_held_with_a_tenth_to_spare_are_held(draw, equal_size):
    rng = np.random.default_rng(1)
    for _ in range(CASES):
        workloads, num_parts = tiny_case(rng, DRAWS["uniform"])
        tokens = DRAWS[draw](rng, len(workloads))
        cap = int(np.ceil(1.1 * best_time(tokens, np.ones(num_parts), equal_size)))
        limits = {"tokens": tokens, "max_tokens": cap}
        home = rng.integers(0, num_parts, len(workloads))
        best = best_time(workloads, np.ones(num_parts), equal_size, limits)
        for partition in (
            longest_processing_time(workloads, num_parts, equal_size, **limits),
            refined(workloads, num_parts, equal_size, **limits),
            rebalance(workloads, home, num_parts, equal_size=equal_size, **limits),
        ):
            assert loads(tokens, partition).max() <= cap
            assert loads(workloads, partition).max() >= best


@pytest.mark.parametrize(
    ("workloads", "parts", "equal_size", "largest_load"),
    [
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
    for scale in (1, 1e-300, 0.1, 1e12):
        scaled = [scale * value for value in workloads]
        assert lower_bound(scaled, parts, equal_size) == pytest.approx(expected)
