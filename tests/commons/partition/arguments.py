"""Right and wrong values of the arguments that functions of numbers have, by the arguments' names."""

import inspect
import warnings
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch

from tests.commons.partition.checks import as_lists

NAN, INF = float("nan"), float("inf")
HALVES = [[0, 2, 4], [1, 3, 5]]
RIGHT: dict[str, Any] = {
    "workloads": [5, 0, 17, 3, 3, 8],
    "home": [0, 1, 1, 1, 0, 0],
    "num_partitions": 2,
    "num_chunks": 2,
    "partition": HALVES,
    "num_steps": 2,
    "window": [HALVES, HALVES],
    "micro_batches": [HALVES, HALVES],
    "tokens": [1, 2, 3, 0, 2, 2],
    "max_tokens": 10**6,
    "multiple_of": 2,
    "min_count": 2,
    "sizes": [1, 2, 3, 4, 5, 6],
    "ranks_per_node": 2,
    "groups": [7, -1, 7, 2, 2, -3],
    "moves_per_copy": 0,
    "speeds": [1.0, 0.5],
    "tolerance": 0.5,
    "token_tolerance": 0.5,
    "max_step_ratio": 1.5,
}


def _of(kind: type) -> Callable[[list], np.ndarray]:
    return lambda values: np.array(values, kind)


INTEGERS = [tuple, torch.tensor, lambda values: np.repeat(values, 2)[::2]]
NUMBERS = [*INTEGERS, lambda values: np.broadcast_to(np.array(values, np.float32), len(values))]
COUNTS = ("num_partitions", "num_chunks", "num_steps", "multiple_of", "min_count", "ranks_per_node")
# Functions that turn a right value into another of the same meaning.
SAME: dict[str, list[Callable[[Any], Any]]] = {
    "workloads": NUMBERS,
    "tokens": [*NUMBERS, _of(np.uint8)],
    "home": [*NUMBERS, _of(bool)],
    "sizes": NUMBERS,
    "groups": [
        *(*INTEGERS, _of(np.int8)),
        lambda groups: [2**63 - 1, -1, 2**63 - 1, 0, 0, -(2**63)],
        lambda groups: np.array([1, 2, 1, 0, 0, 3], np.uint8),
    ],
    "speeds": [*NUMBERS, lambda speeds: [1000.0, 500.0], lambda speeds: [2e-300, 1e-300]],
    "partition": [
        lambda parts: [torch.tensor(part) for part in parts],
        lambda parts: tuple(np.array(part[::-1]) for part in parts),
    ],
    **{name: [np.int8] for name in COUNTS},
    "max_tokens": [np.uint32, lambda cap: np.int8(127), lambda cap: 2**70],
}

# What is taken, though it is as far as can be; the first argument says for which functions.
TAKEN: list[dict[str, Any]] = [
    *({"workloads": [value] * 6} for value in (0, 1e-300, 1e15)),
    {"num_partitions": 7, "speeds": None},
    {"tokens": [2**50] * 6, "max_tokens": 2**60},
    {"tokens": [0] * 6, "max_tokens": 1},
    {"speeds": [1000.0, 1.0]},
    *({"moves_per_copy": copies} for copies in (1, 1000)),
    *({name: tolerance} for name in ("tolerance", "token_tolerance") for tolerance in (0, 1e6)),
    *({"max_step_ratio": ratio} for ratio in (1, 1e9)),
]


def _numbers(name: str) -> list[tuple[Any, str]]:
    """Rows for an argument with a number of at least 0 for each sample."""
    rows: list[tuple[Any, str]] = [([[1, 2, 3]], rf"{name} has shape \(1, 3\)")]
    return rows + [([1, value, 3], rf"{name}\[1\] is {value}") for value in (-2, NAN, INF)]


def _counts(name: str, least: int = 1) -> list[tuple[Any, str]]:
    named = "num_(partitions|chunks)" if name == "num_chunks" else name
    return [(value, f"{named} is {value}") for value in (-3, 2.5, NAN, *range(least))]


def _tolerances(name: str) -> list[tuple[Any, str]]:
    return [(value, f"{name} is {value}") for value in (-0.01, NAN, INF)]


# For each argument wrong values for three samples and two parts, and what the error says.
WRONG: dict[str, list[tuple[Any, str]]] = {
    "workloads": [
        *_numbers("workloads"),
        (np.array([1 + 2j, 2, 3]), "complex128, expected real numbers"),
        (np.ma.masked_array([1, 2, 3], [True, False, False]), "masked array"),
        *(
            (np.ones(3, kind), f"workloads is of {kind}, .* overflow")
            for kind in ("uint8", "int16", "uint32")
        ),
        (torch.ones(3, dtype=torch.int32), "workloads is of int32, .* overflow"),
    ],
    **{name: _counts(name) for name in COUNTS},
    "partition": [
        ([], "num_partitions is 0"),
        ([[0], [1]], "partition has 2 indices, expected each of the 3 samples once"),
        ([[0, 1, 2], [2]], "partition has 4 indices"),
        *(([[0, 1], [third]], "partition has 3 indices") for third in (0, 3, -1, 2.5)),
    ],
    "tokens": [
        *_numbers("tokens"),
        ([1, 1], "tokens has 2 values for 3 workloads"),
        ([1, 2.5, 1], r"tokens\[1\] is 2.5"),
        ([2**52, 2**52, 1], r"tokens add up to .* less than 2\*\*53"),
    ],
    "max_tokens": [*_counts("max_tokens", 0), (0, "max_tokens( is |=)0")],
    "home": [
        *(([0, part, 1], rf"home\[1\] is {part}, expected a part from 0 to 1") for part in (-1, 0.5, 2, NAN)),
        ([[0, 1, 1]], r"home has shape \(1, 3\)"),
        (["a", "b", "c"], r"home has shape \(3,\) and dtype <U1"),
    ],
    "sizes": [*_numbers("sizes"), ([1], "sizes has 1 values for 3 workloads")],
    "groups": [
        (groups, "groups has shape .* expected one integer for each of 3 samples")
        for groups in ([1, 2], [[1, 2, 3]], [0.5, 1.0, 2.0], ["a", "b", "c"])
    ],
    "moves_per_copy": [(value, f"moves_per_copy is {value}, .* 0 to 1000") for value in (-1, 1001, NAN)],
    "speeds": [
        ([1.0], r"speeds has shape \(1,\), expected one for each of 2 parts"),
        *(([1.0, speed], rf"speeds\[1\] is {speed}") for speed in (-1.0, 0.0, NAN, INF)),
        ([1.0, 9.9e-4], "expected the fastest part to be at most 1000 times as fast"),
    ],
    "tolerance": _tolerances("tolerance"),
    "token_tolerance": _tolerances("token_tolerance"),
    "max_step_ratio": [(ratio, f"max_step_ratio is {ratio}") for ratio in (0.9, -1.0, NAN)],
}
OF_THREE = RIGHT | {
    "workloads": [1, 2, 3],
    "home": [0, 1, 0],
    "groups": [7, -1, 7],
    "partition": [[0, 1], [2]],
    "tokens": [1, 1, 1],
    "window": [[[0], [1, 2]]],
    "micro_batches": [[[0], [1, 2]]],
}
NEEDS = {
    "token_tolerance": "tokens",
    "max_tokens": "tokens",
    "tokens": "max_tokens",
    "moves_per_copy": "groups",
}


def check_wrong_arguments(function: Callable[..., Any], but: Collection[str] = ()) -> None:
    """Checks that a wrong value of any argument is an error that names it, `but` those of some."""
    parameters = inspect.signature(function).parameters
    required = {name for name in parameters if parameters[name].default is inspect.Parameter.empty}
    for name in [name for name in parameters if name in WRONG and name not in but]:
        given = required | {NEEDS.get(name, name)} & parameters.keys()
        for value, message in WRONG[name]:
            arguments = {each: OF_THREE[each] for each in given} | {name: value}
            with pytest.raises(ValueError, match=message):
                function(**arguments)
                pytest.fail(f"{arguments} are not refused")


def check_kinds_of_arguments(function: Callable[..., Any]) -> None:
    """Checks that kind and type of arguments do not matter, and that extreme values are taken."""
    right = {name: RIGHT[name] for name in inspect.signature(function).parameters if name in RIGHT}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        expected = as_lists(function(**right))
        for name in right:
            for number, kind in enumerate(SAME.get(name, [])):
                result = function(**right | {name: kind(right[name])})
                assert as_lists(result) == expected, f"{name} as of SAME, {number}"
    for arguments in TAKEN:
        if next(iter(arguments)) in right:
            function(**right | {name: value for name, value in arguments.items() if name in right})
