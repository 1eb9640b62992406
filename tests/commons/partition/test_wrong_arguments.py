from __future__ import annotations

import numpy as np
import pytest

from commons.partition import balance_window, imbalance, loads, lower_bound, rebalance, refine, step_ratios
from tests.commons.partition.every_function import FUNCTIONS, WINDOW

NAN, INF = float("nan"), float("inf")
BY_NAME = FUNCTIONS | WINDOW


def call(name, workloads, parts, **options):
    return BY_NAME[name](workloads, [0] * len(workloads), parts, True, **options)


def from_one_part(workloads, num_partitions):
    return refine(workloads, [range(len(workloads))] * num_partitions)


FROM_NUMBERS = [lambda *arguments, name=name: call(name, *arguments) for name in BY_NAME if name != "refine"]
FROM_NUMBERS.append(lower_bound)


@pytest.mark.parametrize("function", [*FROM_NUMBERS, from_one_part])
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


@pytest.mark.parametrize("function", FROM_NUMBERS)
def test_a_negative_number_of_parts_is_named(function):
    with pytest.raises(ValueError, match="num_partitions is -3"):
        function([1, 2], -3)


@pytest.mark.parametrize("function", [loads, imbalance, lambda work, parts: step_ratios(work, [parts])])
@pytest.mark.parametrize(("workloads", "message"), [([1, -2], r"\[1\] is -2"), ([NAN, 1], r"\[0\] is nan")])
def test_wrong_workloads_of_a_partition_are_named(function, workloads, message):
    with pytest.raises(ValueError, match="workloads" + message):
        function(workloads, [[0], [1]])


def test_no_parts_have_no_imbalance():
    with pytest.raises(ValueError, match="num_partitions is 0"):
        imbalance([1, 2], [])


@pytest.mark.parametrize("name", ["refined", "refine", "rebalance"])
@pytest.mark.parametrize("tolerance", [-0.01, NAN, INF])
def test_wrong_tolerances_are_named(name, tolerance):
    with pytest.raises(ValueError, match=f"tolerance is {tolerance}"):
        call(name, [1, 2], 2, tolerance=tolerance)


@pytest.mark.parametrize("name", ["refined", "rebalance"])
def test_wrong_token_tolerances_are_named(name):
    for tolerance in (-0.01, NAN, INF):
        with pytest.raises(ValueError, match=f"token_tolerance is {tolerance}"):
            call(name, [1, 2], 2, tokens=[3, 4], token_tolerance=tolerance)
    with pytest.raises(ValueError, match="token_tolerance is given without tokens"):
        call(name, [1, 2], 2, token_tolerance=0.1)


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("name", ["longest_processing_time", "refined", "rebalance"])
@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"tokens": [1, 9, 2], "max_tokens": 8}, r"tokens\[1\] is 9, expected at most max_tokens=8"),
        ({"tokens": [5, 5, 5], "max_tokens": 7}, "max_tokens=7 .* at most 14 tokens, the samples have 15"),
        ({"tokens": [5, 5, 5], "max_tokens": 8}, r"max_tokens=8 .* sample \d with 5 tokens fits in none"),
        ({"tokens": [0, 0, 0], "max_tokens": -1}, "max_tokens is -1"),
        ({"tokens": [1, 1, 1]}, "tokens is given without max_tokens"),
        ({"max_tokens": 9}, "max_tokens is given without tokens"),
        ({"tokens": [1, 1], "max_tokens": 9}, "tokens has 2 values for 3 workloads"),
        ({"tokens": [1, -2, 1], "max_tokens": 9}, r"tokens\[1\] is -2"),
        ({"tokens": [1, 1, NAN], "max_tokens": 9}, r"tokens\[2\] is nan"),
        ({"tokens": [1, 2.5, 1], "max_tokens": 9}, r"tokens\[1\] is 2.5"),
    ],
)
def test_caps_that_cannot_be_held_are_named(name, limits, message, equal_size):
    with pytest.raises(ValueError, match=message):
        BY_NAME[name]([1, 2, 3], np.array([0, 0, 1]), 2, equal_size, **limits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"home": [0, 2, 1]}, r"home\[1\] is 2, expected a part from 0 to 1"),
        ({"home": [0, 1, -1]}, r"home\[2\] is -1"),
        ({"home": [0.5, 0, 1]}, r"home\[0\] is 0.5"),
        ({"home": [0, NAN, 1]}, r"home\[1\] is nan"),
        ({"home": [0, INF, 1]}, r"home\[1\] is inf"),
        ({"home": [0, 1]}, r"home has shape \(2,\)"),
        ({"home": [[0, 1, 1]]}, r"home has shape \(1, 3\)"),
        ({"home": 0}, r"home has shape \(\)"),
        ({"home": ["a", "b", "c"]}, r"home has shape \(3,\) and dtype <U1"),
        ({"sizes": [1, -1, 1]}, r"sizes\[1\] is -1"),
        ({"sizes": [NAN, 1, 1]}, r"sizes\[0\] is nan"),
        ({"sizes": [INF, 1, 1]}, r"sizes\[0\] is inf"),
        ({"sizes": [1]}, "sizes has 1 values for 3 workloads"),
        ({"sizes": [[1], [1], [1]]}, r"sizes has shape \(3, 1\)"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"ranks_per_node": -8}, "ranks_per_node is -8"),
    ],
)
def test_wrong_homes_and_costs_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        rebalance([1, 2, 3], **{"home": [0, 1, 0], "num_partitions": 2} | arguments)


@pytest.mark.parametrize(
    ("partition", "options", "message"),
    [
        ([], {}, "num_partitions is 0"),
        ([[0], [1]], {}, "partition has 2 indices, expected each of the 3 samples once"),
        ([[0, 1, 2], [2]], {}, "partition has 4 indices"),
        *(([[0, 1], [third]], {}, "partition") for third in (0, 3, -1, 2.5, NAN)),
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
        *((steps, None, f"num_steps is {steps}") for steps in (0, -1)),
        *((2, ratio, f"max_step_ratio is {ratio}") for ratio in (0.9, -1.0, NAN)),
    ],
)
def test_wrong_windows_are_named(steps, ratio, message):
    with pytest.raises(ValueError, match=message):
        balance_window([1, 2, 3], 2, steps, ratio)


@pytest.mark.parametrize("value", [2.5, NAN])
def test_counts_that_are_no_whole_numbers_are_named(value):
    for argument, name, options in (
        ("num_partitions", "refined", {"parts": value}),
        ("max_tokens", "refined", {"parts": 2, "tokens": [1, 1, 1], "max_tokens": value}),
        ("ranks_per_node", "rebalance", {"parts": 3, "ranks_per_node": value}),
    ):
        with pytest.raises(ValueError, match=f"{argument} is {value}"):
            call(name, [1, 2, 3], **options)
    with pytest.raises(ValueError, match=f"num_steps is {value}"):
        balance_window([1, 2, 3], 2, value)
