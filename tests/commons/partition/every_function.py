"""Every function that partitions, called alike."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from commons.partition import (
    balance_window,
    imbalance,
    karmarkar_karp,
    longest_processing_time,
    lower_bound,
    rebalance,
    refine,
    refined,
)
from tests.commons.partition.checks import SLACK, as_lists, check_partition

REPOSITORY = Path(__file__).parents[3]
Partition = list[np.ndarray]
Function = Callable[[Sequence, int, bool], Partition]
NUM_STEPS = 3


def as_loaded(workloads: Sequence) -> np.ndarray:
    return np.arange(len(workloads))


def joined(groups: list[Partition]) -> Partition:
    return [part for group in groups for part in group]


def _from_scratch(function: Callable[..., Partition]) -> Callable[..., Partition]:
    return lambda workloads, home, parts, equal_size, **options: function(
        workloads, parts, equal_size, **options
    )


# From (workloads, home, number of parts, equal sizes, options) to as many parts.
FUNCTIONS: dict[str, Callable[..., Partition]] = {
    "karmarkar_karp": _from_scratch(karmarkar_karp),
    "longest_processing_time": _from_scratch(longest_processing_time),
    "refined": _from_scratch(refined),
    "refine": lambda workloads, home, parts, equal_size, **options: refine(
        workloads, np.array_split(as_loaded(workloads), parts), equal_size=equal_size, **options
    ),
    "rebalance": lambda workloads, home, parts, equal_size, **options: rebalance(
        workloads, home, parts, equal_size=equal_size, **options
    ),
}
# To NUM_STEPS times as many parts.
WINDOW: dict[str, Callable[..., Partition]] = {
    "balance_window": lambda workloads, home, parts, equal_size, **options: joined(
        balance_window(workloads, parts, NUM_STEPS, equal_size=equal_size, **options)
    )
}


def _call(name: str, **options: Any) -> Function:
    """The function of that name with those options, of which arrays are made from consecutive numbers."""

    def partition(workloads: Sequence, parts: int, equal_size: bool) -> Partition:
        numbers = as_loaded(workloads)
        made = {option: make(numbers, parts) if callable(make) else make for option, make in options.items()}
        return (FUNCTIONS | WINDOW)[name](workloads, numbers % parts, parts, equal_size, **made)

    return partition


_CAPS = {"tokens": lambda n, parts: n % 5, "max_tokens": lambda n, parts: 5 * len(n) // parts + 5}
_EVEN_TOKENS = {"tokens": lambda n, parts: n % 5, "token_tolerance": 0.1}
ONE_STEP: dict[str, Function] = {name: _call(name) for name in FUNCTIONS} | {
    "longest_processing_time with caps": _call("longest_processing_time", **_CAPS),
    "rebalance with costs": _call("rebalance", sizes=lambda n, parts: n, ranks_per_node=2),
    "rebalance with a token tolerance": _call("rebalance", **_EVEN_TOKENS),
    "refined with a token tolerance": _call("refined", **_EVEN_TOKENS),
}
PARTITIONS: dict[str, Function] = ONE_STEP | {
    "balance_window": _call("balance_window"),
    "balance_window with a ratio": _call("balance_window", max_step_ratio=1.25),
}


def check_conserved(
    function: Function, workloads: list, parts: int, equal_size: bool, doublings: int, num_parts: int | None
) -> None:
    """Checks that each sample is in one of `num_parts` parts whatever the unit; None for any number."""
    partition = function(workloads, parts, equal_size)
    is_equal = equal_size and num_parts is not None
    num_parts = len(partition) if num_parts is None else num_parts
    check_partition(partition, len(workloads), num_parts, is_equal)
    assert imbalance(workloads, partition) * SLACK >= lower_bound(workloads, num_parts, is_equal)
    expected = as_lists(partition)
    assert as_lists(function(list(workloads), parts, equal_size)) == expected
    scaled = [value * 2.0**doublings for value in workloads]
    assert as_lists(function(scaled, parts, equal_size)) == expected


def partitions_with_ties(functions: dict[str, Function]) -> dict[str, list[list[int]]]:
    workloads = np.random.default_rng(1).integers(0, 40, 200)
    return {
        f"{name}, {equal_size=}": as_lists(function(workloads, 7, equal_size))
        for name, function in functions.items()
        for equal_size in (True, False)
    }


def check_alike_in_other_processes(module: str, table: str) -> None:
    """Checks that a process with another hash seed partitions as this one, by a table of a module."""
    program = f"from {__name__} import partitions_with_ties; from {module} import {table} as table; "
    output = subprocess.run(
        [sys.executable, "-c", program + "print(partitions_with_ties(table))"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout
    assert output.strip() == str(partitions_with_ties(getattr(importlib.import_module(module), table)))
