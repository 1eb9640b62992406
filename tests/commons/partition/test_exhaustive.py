from __future__ import annotations

import numpy as np
import pytest

from commons.partition import loads, longest_processing_time, rebalance, refined
from tests.commons.partition.exhaustive import best_load

CASES = 150
DRAWS = {
    "uniform": lambda rng, n: rng.integers(1, 100, n),
    "lognormal": lambda rng, n: rng.lognormal(5, 1.2, n).astype(np.int64) + 1,
    "zipf": lambda rng, n: rng.zipf(1.2, n).clip(1, 4096),
}


def tiny_case(rng, draw):
    """(workloads, number of parts)"""
    return draw(rng, rng.integers(1, 9)), int(rng.integers(2, 4))


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("draw", DRAWS)
def test_refined_is_close_to_the_best_there_is(draw, equal_size):
    rng = np.random.default_rng(0)
    gaps = []
    for _ in range(CASES):
        workloads, num_parts = tiny_case(rng, DRAWS[draw])
        largest = loads(workloads, refined(workloads, num_parts, equal_size)).max()
        gaps.append(100 * (largest / best_load(workloads, num_parts, equal_size, {}) - 1))
    median, most, nearly_all, largest = np.percentile(gaps, [50, 90, 99, 100])
    print(
        f"\ngap to the optimum in %, {draw}, {equal_size=}: mean {np.mean(gaps):.3f}, median {median:.3f}, "
        f"90th percentile {most:.3f}, 99th {nearly_all:.3f}, max {largest:.3f}"
    )
    assert min(gaps) >= -1e-9
    assert np.mean(gaps) <= 0.1


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("draw", DRAWS)
def test_caps_that_can_be_held_with_a_tenth_to_spare_are_held(draw, equal_size):
    rng = np.random.default_rng(1)
    for _ in range(CASES):
        workloads, num_parts = tiny_case(rng, DRAWS["uniform"])
        tokens = DRAWS[draw](rng, len(workloads))
        cap = int(np.ceil(1.1 * best_load(tokens, num_parts, equal_size, {})))
        limits = {"tokens": tokens, "max_tokens": cap}
        home = rng.integers(0, num_parts, len(workloads))
        best = best_load(workloads, num_parts, equal_size, limits)
        for partition in (
            longest_processing_time(workloads, num_parts, equal_size, **limits),
            refined(workloads, num_parts, equal_size, **limits),
            rebalance(workloads, home, num_parts, equal_size=equal_size, **limits),
        ):
            assert loads(tokens, partition).max() <= cap
            assert loads(workloads, partition).max() >= best
