"""The best partition of a few samples, by trying all."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import numpy as np


@functools.cache
def _all_partitions(num_samples: int, num_parts: int) -> np.ndarray:
    """float64 `[partitions, parts, samples]`, 1 where a sample is in a part; sample 0 is always in part 0."""
    part_of = np.array([(0, *others) for others in product(range(num_parts), repeat=num_samples - 1)])
    return np.stack([part_of == part for part in range(num_parts)], axis=1).astype(np.float64)


def best_load(workloads: np.ndarray, num_parts: int, equal_size: bool, limits: dict[str, Any]) -> float:
    """The smallest that the largest load can be; infinite if no partition keeps to the limits."""
    partitions = _all_partitions(len(workloads), num_parts)
    sizes = partitions.sum(axis=2)
    allowed = np.ptp(sizes, axis=1) <= (1 if equal_size else len(workloads))
    if "max_tokens" in limits:
        allowed &= (partitions @ limits["tokens"]).max(axis=1) <= limits["max_tokens"]
    return float((partitions[allowed] @ workloads).max(axis=1).min(initial=np.inf))


def best_time(workloads: np.ndarray, speeds: np.ndarray, equal_size: bool) -> float:
    """The smallest that the largest load ÷ speed can be."""
    partitions = np.array([(*part_of,) for part_of in product(range(len(speeds)), repeat=len(workloads))])
    is_in = np.stack([partitions == part for part in range(len(speeds))], axis=1)
    sizes = is_in.sum(axis=2)
    allowed = np.ptp(sizes, axis=1) <= (1 if equal_size else len(workloads))
    return float((is_in[allowed] @ workloads / speeds).max(axis=1).min())
