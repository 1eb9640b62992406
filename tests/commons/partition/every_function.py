"""Every function that partitions, called alike, and the properties that all of them have."""

import inspect
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st

from commons.partition import (
    imbalance,
    karmarkar_karp,
    longest_processing_time,
    lower_bound,
    rebalance,
    refined,
)
from tests.commons.partition.checks import (
    ROUNDING,
    SLACK,
    as_lists,
    check_partition,
    is_even,
    is_no_worse,
    keeps,
    or_none,
    parts_at,
)
from tests.commons.partition.drawn_workloads import Problem, problems
from tests.commons.partition.internals import refine

Partition = list[np.ndarray]


@dataclass(frozen=True)
class Function:
    """A function, with the names of its options.

    It makes `parts_each` of each of `parts`, or any number of any sizes if that is None. With
    `improves_home`, it is never worse than a home that keeps to the limits.
    """

    call: Callable[..., Partition]
    takes: Set[str] = frozenset()
    parts_each: int | None = 1
    improves_home: bool = False

    def __call__(self, workloads: Sequence, home: Sequence, parts: int, equal_size: bool, **options: Any):
        return self.call(workloads, home, parts, equal_size, **options)


def _from_scratch(function: Callable[..., Partition]) -> Function:
    return Function(
        lambda workloads, home, parts, equal_size, **options: function(
            workloads, parts, equal_size, **options
        ),
        frozenset(inspect.signature(function).parameters),
    )


def _refine(workloads: Sequence, home: Sequence, parts: int, equal_size: bool, **options: Any) -> Partition:
    start = parts_at(home, parts)
    if equal_size and not is_even(start):
        start = np.array_split(np.arange(len(workloads)), parts)
    return refine(workloads, start, equal_size=equal_size, **options)


FUNCTIONS: dict[str, Function] = {
    "karmarkar_karp": _from_scratch(karmarkar_karp),
    "longest_processing_time": _from_scratch(longest_processing_time),
    "refined": _from_scratch(refined),
    "refine": Function(_refine, frozenset(("speeds", "tolerance")), improves_home=True),
    "rebalance": Function(
        lambda workloads, home, parts, equal_size, **options: rebalance(
            workloads, home, parts, equal_size=equal_size, **options
        ),
        frozenset(inspect.signature(rebalance).parameters),
        improves_home=True,
    ),
}


def problems_of(function: Function) -> st.SearchStrategy[Problem]:
    return problems(function.takes)


def check_properties(function: Function, problem: Problem) -> None:
    """Checks what holds for every function, as named in the comments."""
    workloads, options, speeds = problem.workloads, problem.options, problem.options.get("speeds")
    place = partial(or_none, function, home=problem.home, parts=problem.parts, equal_size=problem.equal_size)
    at_home = parts_at(problem.home, problem.parts)
    is_home_allowed = keeps(at_home, options) and (not problem.equal_size or is_even(at_home))
    partition = place(workloads=workloads, **options)
    if partition is None:
        assert not function.improves_home or not is_home_allowed
        return
    # Each sample is in one part, and sizes and caps are kept.
    is_equal = problem.equal_size and function.parts_each is not None
    num_parts = len(partition) if function.parts_each is None else problem.parts * function.parts_each
    check_partition(partition, len(workloads), num_parts, is_equal)
    assert keeps(partition, options)
    # No partition beats the bound, and none is worse than home.
    if num_parts == problem.parts or speeds is None:
        slack = SLACK if speeds is None else ROUNDING
        assert imbalance(workloads, partition, speeds) * slack >= lower_bound(
            workloads, num_parts, is_equal, speeds
        )
    if function.improves_home and is_home_allowed and "token_tolerance" not in options:
        assert is_no_worse(workloads, partition, at_home, speeds)
    # Neither the unit of the workloads nor speeds that are equal change anything, nor does a second call.
    expected = as_lists(partition)
    doubled = [value * 2.0 ** (1 + len(workloads)) for value in workloads]
    assert as_lists(place(workloads=doubled, **options)) == expected
    if speeds is None and "speeds" in function.takes:
        equal = np.full(problem.parts, [1.0, 2.0, 1e-3, 7e5][len(workloads) % 4])
        assert as_lists(place(workloads=workloads, **options, speeds=equal)) == expected


def check_many_workloads(function: Function) -> None:
    """Checks that the sum of workloads may exceed int64."""
    workloads = 1e15 * (1 + 0.1 * np.random.default_rng(0).random(100_000))
    for equal_size in (True, False):
        partition = function(workloads, np.arange(len(workloads)) % 64, 64, equal_size)
        check_partition(partition, len(workloads), len(partition), equal_size)
        assert imbalance(workloads, partition) <= 1.01 * lower_bound(workloads, len(partition), equal_size)
