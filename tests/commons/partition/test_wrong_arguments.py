from __future__ import annotations

import pytest

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
    step_ratios,
)

NAN, INF = float("nan"), float("inf")


def rebalanced(workloads, num_partitions, **options):
    return rebalance(workloads, [0] * len(workloads), num_partitions, **options)


def window(workloads, num_partitions, **options):
    return balance_window(workloads, num_partitions, 2, **options)


def ratios(workloads, partition):
    return step_ratios(workloads, [partition])


def from_one_part(workloads, num_partitions):
    return refine(workloads, [range(len(workloads))] * num_partitions)


FROM_NUMBERS = [
    karmarkar_karp,
    longest_processing_time,
    refined,
    rebalanced,
    window,
    lower_bound,
    from_one_part,
]


@pytest.mark.parametrize("function", FROM_NUMBERS)
@pytest.mark.parametrize(
    ("workloads", "parts", "message"),
    [
        ([1, -2], 2, r"workloads\[1\] is -2.0"),
        ([1, NAN], 2, r"workloads\[1\] is nan"),
        ([INF], 2, r"workloads\[0\] is inf"),
        ([[1]], 2, r"workloads has shape \(1, 1\)"),
        ([1], 0, "num_partitions is 0"),
    ],
)
def test_wrong_workloads_and_numbers_of_parts_are_named(function, workloads, parts, message):
    with pytest.raises(ValueError, match=message):
        function(workloads, parts)


@pytest.mark.parametrize("function", [function for function in FROM_NUMBERS if function is not from_one_part])
def test_a_negative_number_of_parts_is_named(function):
    with pytest.raises(ValueError, match="num_partitions is -3"):
        function([1, 2], -3)


@pytest.mark.parametrize("function", [loads, imbalance, ratios])
@pytest.mark.parametrize(("workloads", "message"), [([1, -2], r"\[1\] is -2"), ([NAN, 1], r"\[0\] is nan")])
def test_wrong_workloads_of_a_partition_are_named(function, workloads, message):
    with pytest.raises(ValueError, match="workloads" + message):
        function(workloads, [[0], [1]])


def test_no_parts_have_no_imbalance():
    with pytest.raises(ValueError, match="num_partitions is 0"):
        imbalance([1, 2], [])


@pytest.mark.parametrize("tolerance", [-0.01, NAN, INF])
def test_wrong_tolerances_are_named(tolerance):
    message = f"tolerance is {tolerance}"
    with pytest.raises(ValueError, match=message):
        refined([1, 2], 2, tolerance=tolerance)
    with pytest.raises(ValueError, match=message):
        refine([1, 2], [[0], [1]], tolerance)
    with pytest.raises(ValueError, match=message):
        rebalance([1, 2], [0, 1], 2, tolerance)
    for function in (refined, rebalanced):
        with pytest.raises(ValueError, match=f"token_tolerance is {tolerance}"):
            function([1, 2], 2, tokens=[3, 4], token_tolerance=tolerance)


@pytest.mark.parametrize("function", [refined, rebalanced])
def test_a_token_tolerance_needs_tokens(function):
    with pytest.raises(ValueError, match="token_tolerance is given without tokens"):
        function([1, 2], 2, token_tolerance=0.1)


@pytest.mark.parametrize(
    ("home", "message"),
    [
        ([0, 2, 1], r"home\[1\] is 2, expected a part from 0 to 1"),
        ([0, 1, -1], r"home\[2\] is -1"),
        ([0.5, 0, 1], r"home\[0\] is 0.5"),
        ([0, NAN, 1], r"home\[1\] is nan"),
        ([0, INF, 1], r"home\[1\] is inf"),
        ([0, 1], r"home has shape \(2,\)"),
        ([[0, 1, 1]], r"home has shape \(1, 3\)"),
        (0, r"home has shape \(\)"),
    ],
)
def test_wrong_homes_are_named(home, message):
    with pytest.raises(ValueError, match=message):
        rebalance([1, 2, 3], home, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": [1, -1]}, r"sizes\[1\] is -1"),
        ({"sizes": [NAN, 1]}, r"sizes\[0\] is nan"),
        ({"sizes": [INF, 1]}, r"sizes\[0\] is inf"),
        ({"sizes": [1]}, "sizes has 1 values for 2 workloads"),
        ({"sizes": [[1], [1]]}, r"sizes has shape \(2, 1\)"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"ranks_per_node": -8}, "ranks_per_node is -8"),
    ],
)
def test_wrong_costs_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        rebalance([1, 2], [0, 1], 2, **options)


@pytest.mark.parametrize(
    ("partition", "options", "message"),
    [
        ([], {}, "num_partitions is 0"),
        ([[0], [1]], {}, "partition has 2 indices, expected each of the 3 samples once"),
        ([[0, 1, 2], [2]], {}, "partition has 4 indices"),
        ([[0, 0], [1]], {}, "partition"),
        ([[0, 1], [3]], {}, "partition"),
        ([[0, 1], [-1]], {}, "partition"),
        ([[0, 1], [2.5]], {}, "partition"),
        ([[0, 1], [NAN]], {}, "partition"),
        ([[0, 1, 2], []], {}, r"partition\[0\] has 3 samples, expected 1 to 2"),
        ([[], [0, 1, 2]], {}, r"partition\[0\] has 0 samples, expected 1 to 2"),
        ([[0, 1], [2]], {"tokens": [4, 4, 1], "max_tokens": 7}, r"partition\[0\] has 8 tokens.*max_tokens=7"),
        ([[0, 1], [2]], {"tokens": [4, 8, 1], "max_tokens": 7}, r"tokens\[1\] is 8"),
        ([[0, 1], [2]], {"max_tokens": 7}, "max_tokens is given without tokens"),
    ],
)
def test_wrong_partitions_to_refine_are_named(partition, options, message):
    with pytest.raises(ValueError, match=message):
        refine([1, 2, 3], partition, **options)


@pytest.mark.parametrize(
    ("steps", "ratio", "message"),
    [
        (0, None, "num_steps is 0"),
        (-1, None, "num_steps is -1"),
        (2, 0.9, "max_step_ratio is 0.9"),
        (2, -1.0, "max_step_ratio is -1.0"),
        (2, NAN, "max_step_ratio is nan"),
    ],
)
def test_wrong_windows_are_named(steps, ratio, message):
    with pytest.raises(ValueError, match=message):
        balance_window([1, 2, 3], 2, steps, ratio)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("num_partitions", lambda value: refined([1, 2, 3], value)),
        ("num_steps", lambda value: balance_window([1, 2, 3], 2, value)),
        ("max_tokens", lambda value: refined([1, 2, 3], 2, tokens=[1, 1, 1], max_tokens=value)),
        ("ranks_per_node", lambda value: rebalance([1, 2, 3], [0, 0, 0], 3, ranks_per_node=value)),
    ],
)
@pytest.mark.parametrize("value", [2.5, NAN])
def test_counts_that_are_no_whole_numbers_are_named(argument, call, value):
    with pytest.raises(ValueError, match=f"{argument} is {value}"):
        call(value)
