"""Tokens within a tolerance of their mean, as far as the target load leaves room."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.partition import imbalance, loads, lower_bound, rebalance, refined
from commons.partition.problem import Problem
from commons.perf_model import HSTUFlops
from tests.commons.partition.checks import SLACK, as_lists, check_partition, keeps, part_of, parts_at
from tests.commons.partition.drawn_workloads import SMALL, TOLERANCES, caps, costs, samples_at_home

# Slower parts take loads that are rounded to whole numbers.
ROUNDING = 1 + 1e-6
MORE_MOVED = 0.04
ROWS, DRAWS = 32, 5


@st.composite
def problems(draw):
    """(workloads, home, parts, options with tokens)"""
    workloads, home, parts = draw(samples_at_home())
    options = draw(costs(len(workloads))) | draw(st.just({}) | caps(len(workloads), parts))
    if draw(st.booleans()):
        options["speeds"] = draw(st.lists(st.floats(0.3, 3), min_size=parts, max_size=parts))
    tokens = st.lists(SMALL, min_size=len(workloads), max_size=len(workloads))
    options["equal_size"] = draw(st.booleans())
    return workloads, home, parts, options, options.get("tokens") or draw(tokens)


def or_none(function, *arguments, **options):
    """Calls the function; returns None if tight caps leave no placement."""
    try:
        return function(*arguments, **options)
    except ValueError as error:
        assert "no placement under max_tokens" in str(error)
        return None


def fullest(tokens, partition):
    return loads(tokens, partition).max()


def allowed_imbalance(workloads, parts, tolerance, options):
    """The time that the tolerance allows under limits on rows, which the lower bound alone does not know."""
    limits = {name: options.get(name) for name in ("equal_size", "speeds")}
    problem = Problem.of(workloads, parts, **limits)
    target = problem.target(tolerance)
    return target * problem.speeds.sum() / max(problem.work.sum(), 1)


def check_against(without, partition, workloads, tokens, options, token_tolerance, allowed):
    """Limits and target load hold; tokens of the fullest part are fewer, unless nothing has changed."""
    parts = len(without)
    check_partition(partition, len(workloads), parts, options["equal_size"])
    assert keeps(partition, options)
    speeds = options.get("speeds")
    reached, before = imbalance(workloads, partition, speeds), imbalance(workloads, without, speeds)
    assert reached <= max(before, allowed) * ROUNDING
    if as_lists(partition) != as_lists(without):
        assert fullest(tokens, partition) < fullest(tokens, without)
        assert fullest(tokens, without) > (1 + token_tolerance) * sum(tokens) / parts


@settings(max_examples=300, deadline=None)
@given(problem=problems(), tolerance=TOLERANCES, token_tolerance=TOLERANCES)
def test_tokens_are_evened_out_within_limits_and_target_at_few_moves(problem, tolerance, token_tolerance):
    workloads, home, parts, options, tokens = problem
    without = or_none(rebalance, workloads, home, parts, tolerance, **options)
    heeding = options | {"tokens": tokens, "token_tolerance": token_tolerance}
    partition = or_none(rebalance, workloads, home, parts, tolerance, **heeding)
    assert (partition is None) == (without is None)
    if without is None:
        return
    allowed = allowed_imbalance(workloads, parts, tolerance, options)
    check_against(without, partition, workloads, tokens, options, token_tolerance, allowed)
    moved, moved_without = (np.sum(part_of(each) != home) for each in (partition, without))
    assert moved <= moved_without + MORE_MOVED * len(workloads)


@settings(max_examples=200, deadline=None)
@given(problem=problems(), tolerance=TOLERANCES, token_tolerance=TOLERANCES)
def test_from_scratch_tokens_are_evened_out_as_well(problem, tolerance, token_tolerance):
    workloads, _, parts, options, tokens = problem
    options = {name: value for name, value in options.items() if name not in ("sizes", "ranks_per_node")}
    without = or_none(refined, workloads, parts, tolerance=tolerance, **options)
    heeding = options | {"tokens": tokens, "token_tolerance": token_tolerance}
    partition = or_none(refined, workloads, parts, tolerance=tolerance, **heeding)
    assert (partition is None) == (without is None)
    if without is None:
        return
    allowed = allowed_imbalance(workloads, parts, tolerance, options)
    check_against(without, partition, workloads, tokens, options, token_tolerance, allowed)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), equal_size=st.booleans())
def test_nothing_moves_where_home_is_within_both_tolerances(data, equal_size):
    workloads, home, parts = data.draw(samples_at_home(even=equal_size))
    tokens = data.draw(st.lists(SMALL, min_size=len(home), max_size=len(home)))
    at_home = parts_at(home, parts)
    partition = rebalance(
        workloads,
        home,
        parts,
        imbalance(workloads, at_home) / lower_bound(workloads, parts, equal_size) * SLACK - 1,
        equal_size=equal_size,
        tokens=tokens,
        token_tolerance=imbalance(tokens, at_home) * SLACK - 1,
    )
    assert part_of(partition).tolist() == list(home)


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize(("ranks", "hidden_size"), [(64, 256), (64, 1024), (256, 256)])
def test_long_histories_leave_room_for_both(ranks, hidden_size, equal_size):
    rng = np.random.default_rng(0)
    flops = HSTUFlops(num_layers=1, hidden_size=hidden_size, num_heads=1, head_dim=hidden_size)
    home = np.repeat(np.arange(ranks), ROWS)
    for _ in range(DRAWS):
        tokens = 2 * rng.lognormal(7.9, 1.07, len(home)).clip(1, 27_738).astype(np.int64)
        workloads = flops.per_sample(tokens)
        without = rebalance(workloads, home, ranks, equal_size=equal_size)
        partition = rebalance(
            workloads, home, ranks, equal_size=equal_size, tokens=tokens, token_tolerance=0.1
        )
        assert imbalance(tokens, without) > 1.1 >= imbalance(tokens, partition)
        assert imbalance(workloads, partition) <= 1.001 * imbalance(workloads, without)
        assert np.mean(part_of(partition) != home) <= np.mean(part_of(without) != home) + 0.02


def test_tokens_follow_no_speeds():
    tokens = np.ones(400, dtype=np.int64)
    tokens[:10] = 100
    home = np.arange(400) // 20 % 2
    options = {"speeds": [1.0, 0.5], "equal_size": False, "tokens": tokens}
    partition = rebalance(np.ones(400), home, 2, 0.2, token_tolerance=0.1, **options)
    assert imbalance(tokens, partition) <= 1.1


def test_the_cheapest_samples_move_and_never_more_than_the_limit():
    workloads, tokens = [4] * 4 + [100] * 96, [9, 9, 1, 1] + [5] * 96
    home, sizes = [0, 0, 1, 1] + [0, 1] * 48, [5, 1, 1, 5] + [9] * 96
    options = {"sizes": sizes, "tokens": tokens, "token_tolerance": 0.01}
    partition = rebalance(workloads, home, 2, **options)
    assert np.flatnonzero(part_of(partition) != home).tolist() == [1, 2]
    few = {name: values[:4] for name, values in options.items() if name != "token_tolerance"}
    assert as_lists(rebalance(workloads[:4], home[:4], 2, token_tolerance=0.01, **few)) == [[0, 1], [2, 3]]
