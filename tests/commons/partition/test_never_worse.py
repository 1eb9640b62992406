"""No placement is worse than the one that it replaces, equal-size Karmarkar–Karp, in any draw."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.partition import imbalance, karmarkar_karp, lower_bound, rebalance, refined
from tests.commons.partition.checks import ROUNDING, SLACK, keeps, part_of
from tests.commons.partition.drawn_workloads import caps, samples_at_home
from tests.commons.partition.every_function import FUNCTIONS
from tests.commons.partition.heavy_tails import DRAWN_LENGTHS as LENGTHS
from tests.commons.partition.heavy_tails import FLOPS, SPEEDS
from tests.commons.partition.internals import loads

TOLERANCE = 0.002  # the default of "rebalance"


def largest(workloads, partition):
    return loads(workloads, partition).max()


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("speeds_of", SPEEDS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_drawn_lengths(lengths, speeds_of, equal_size):
    rng, is_equal = np.random.default_rng(0), speeds_of == "equal"
    for draw in range(500 if is_equal else 100):
        ranks, rows = int(rng.integers(2, 65)), int(rng.integers(2, 33))
        workloads = FLOPS.per_sample(2 * LENGTHS[lengths](rng, ranks * rows).astype(np.int64) + 1)
        speeds = None if is_equal else SPEEDS[speeds_of](rng, ranks)
        slack, case = SLACK if is_equal else ROUNDING, f"draw {draw}: {ranks} ranks of {rows} rows"
        home = np.repeat(np.arange(ranks), rows)
        peers, found, moved = (
            imbalance(workloads, FUNCTIONS[name](workloads, home, ranks, even, speeds=speeds), speeds)
            for name, even in (("karmarkar_karp", True), ("refined", equal_size), ("rebalance", equal_size))
        )
        bound = lower_bound(workloads, ranks, equal_size, speeds)
        assert bound <= found * slack and found <= peers * slack, case
        assert moved <= max(peers, (1 + TOLERANCE) * bound) * slack, case


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


@given(data=st.data(), equal_size=st.booleans())
def test_any_workloads_and_limits(data, equal_size):
    workloads, home, parts = data.draw(samples_at_home())
    limits = data.draw(st.just({}) | caps(len(workloads), parts))
    peers = karmarkar_karp(workloads, parts)
    bound = lower_bound(workloads, parts, equal_size) * np.sum(workloads, dtype=float) / parts
    if not workloads or not keeps(peers, limits):
        return
    load = largest(workloads, peers)
    assert largest(workloads, refined(workloads, parts, equal_size, **limits)) <= load * SLACK
    moved = rebalance(workloads, home, parts, TOLERANCE, equal_size=equal_size, **limits)
    assert largest(workloads, moved) <= max(load, (1 + TOLERANCE) * bound) * SLACK


@pytest.mark.parametrize(
    ("partitioner", "max_tokens", "workloads", "tokens"),
    [
        (
            refined,
            22,
            [3, 9, 2, 3, 0, 7, 8, 3, 5, 2, 0, 8, 1, 9, 8, 3, 1, 3],
            [1, 5, 3, 1, 0, 4, 3, 3, 3, 3, 1, 0, 5, 3, 4, 0, 2, 3],
        ),
        (
            lambda workloads, parts, **limits: rebalance(workloads, [0, 1] * 9, parts, **limits),
            24,
            [0, 1, 1, 2, 4, 9, 3, 8, 2, 6, 9, 6, 6, 2, 8, 6, 6, 2],
            [4, 0, 4, 0, 1, 4, 3, 1, 5, 4, 4, 0, 1, 3, 5, 2, 5, 2],
        ),
    ],
)
def test_where_longest_first_finds_no_place_under_max_tokens(partitioner, max_tokens, workloads, tokens):
    peers = karmarkar_karp(workloads, 2)
    partition = partitioner(workloads, 2, tokens=tokens, max_tokens=max_tokens)
    assert keeps(partition, {"tokens": tokens, "max_tokens": max_tokens})
    assert largest(workloads, partition) <= largest(workloads, peers)
