"""Checks of partitions."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from commons.partition import imbalance
from tests.commons.partition.internals import loads

SLACK = 1 + 1e-9  # loads are compared as sums of float64
ROUNDING = 1 + 1e-6  # with speeds, workloads are rounded to fewer bits than float64 has


def check_partition(partition: list[np.ndarray], num_samples: int, num_parts: int, equal_size: bool) -> None:
    """A permutation of the samples into that many parts, each ascending."""
    assert len(partition) == num_parts
    assert all(part.dtype == np.int64 and part.ndim == 1 for part in partition)
    assert sorted(np.concatenate(partition).tolist()) == list(range(num_samples))
    assert all((np.diff(part) > 0).all() for part in partition)
    assert not equal_size or is_even(partition)


def is_even(partition: list[np.ndarray]) -> bool:
    sizes = [len(part) for part in partition]
    return max(sizes) - min(sizes) <= 1


def keeps(partition: list[np.ndarray], limits: dict[str, Any]) -> bool:
    """Whether the parts keep to `max_tokens` with `tokens`, where these are given."""
    return "max_tokens" not in limits or loads(limits["tokens"], partition).max() <= limits["max_tokens"]


def is_no_worse(
    workloads: Sequence,
    partition: list[np.ndarray],
    other: list[np.ndarray],
    speeds: ArrayLike | None = None,
) -> bool:
    slack = SLACK if speeds is None else ROUNDING
    return imbalance(workloads, partition, speeds) <= imbalance(workloads, other, speeds) * slack


def or_none(function: Callable, *arguments: Any, **limits: Any) -> list[np.ndarray] | None:
    """Calls the function; returns None if tight caps leave no placement."""
    try:
        return function(*arguments, **limits)
    except ValueError as error:
        named = re.search(r"max_tokens=(\d+) .* sample (\d+) with (\d+) tokens", str(error))
        assert named, error
        cap, sample, amount = map(int, named.groups())
        assert cap == limits["max_tokens"] and amount == limits["tokens"][sample]
        return None


def parts_at(home: Sequence[int] | np.ndarray, num_parts: int) -> list[np.ndarray]:
    """The partition in which every sample is at home."""
    return [np.flatnonzero(np.asarray(home) == part) for part in range(num_parts)]


def part_of(partition: list[np.ndarray]) -> np.ndarray:
    """`[samples]`, the part that each is in."""
    parts = np.empty(sum(len(part) for part in partition), dtype=np.int64)
    for number, part in enumerate(partition):
        parts[part] = number
    return parts


def as_lists(result: Any) -> Any:
    """Arrays in lists of any depth as lists of numbers."""
    return [as_lists(part) for part in result] if isinstance(result, list) else np.asarray(result).tolist()
