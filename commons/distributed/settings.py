"""The core settings of a shuffler, for the placement of samples and for their exchange."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checks import SettingError, UnknownSettingError, check_types
from ..partition import karmarkar_karp, longest_processing_time, rebalance, refined

PARTITIONERS: dict[str, Callable[..., Any]] = {
    "karmarkar_karp": karmarkar_karp,
    "longest_processing_time": longest_processing_time,
    "rebalance": rebalance,
    "refined": refined,
}
"""Partitioners by name. To add one, add an entry, here or from your own module.

A partitioner gets the arguments that its signature names: workloads, num_partitions, home (rank that loaded
each sample), sizes (bytes per sample), ranks_per_node, speeds, equal_size, tolerance, tokens, max_tokens,
token_tolerance, and those of extensions, such as groups. Those that may be None need defaults, because None
is not passed. The result must be the same on all ranks: either the sample indices of each rank, or int64
`[samples]`, the rank of each sample. Provisional: may change in a minor version.
"""
OWN_PARTITIONERS = frozenset(PARTITIONERS)

EXCHANGE_NAMES = ("all_gather", "all_to_all")


@dataclass(frozen=True)
class ShufflerSettings:
    """The settings by which a shuffler places and exchanges samples.

    Shufflers take these fields as keyword arguments. `TrainerArgs` has them as `balance_<field>`, with the
    same defaults and checks. Provisional: may change in a minor version.

    Attributes:
        partitioner: key of `PARTITIONERS`. "rebalance" moves few samples, and avoids crossing nodes.
            "refined" gets as close to the lower bound as it can, but moves nearly every sample.
            "longest_processing_time" and "karmarkar_karp" are the usual heuristics.
        tolerance: allowed excess of the largest load, which may reach (1 + tolerance) × the lower bound. None
            means 0 for "refined". For "rebalance", it means 0.01 with groups, and else 0.002, but 0.005 or
            0.01 if tokens would otherwise exceed `token_tolerance`. The other partitioners have no tolerance.
        equal_rows: whether all ranks compute the same number of rows, with numbers of real rows that differ
            by at most one. If False, the number of rows follows the load.
        max_tokens: limit on the tokens of a rank, as `get_tokens` counts them. None means no limit. If a
            batch cannot be placed within the limit, every rank raises an error.
        token_tolerance: allowed excess of the fullest rank, which may hold (1 + token_tolerance) × the mean
            tokens. The target load has priority, and at most 4% more samples move, plus others of their
            groups. This setting bounds activations even without `max_tokens`, and never fails. Partitioners
            without this argument ignore it. None means that tokens are not balanced.
        exchange: collective that moves the samples. "all_to_all" sends each sample straight to its
            destination. "all_gather" sends all samples to all ranks.

    Raises:
        TypeError: a value does not have the type of its annotation.
        KeyError: the partitioner or the exchange is unknown.
        ValueError: a value is out of range, or has no effect in combination with the others.
    """

    partitioner: str = "rebalance"
    tolerance: float | None = None
    equal_rows: bool = True
    max_tokens: int | None = None
    token_tolerance: float | None = 0.10
    exchange: str = "all_to_all"

    def __post_init__(self) -> None:
        check_types(self)
        for name, known in (("partitioner", PARTITIONERS), ("exchange", EXCHANGE_NAMES)):
            if (value := getattr(self, name)) not in known:
                raise UnknownSettingError(f"unknown {{{name}}}; there are {sorted(known)}", **{name: value})
        for name in ("tolerance", "token_tolerance"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < np.inf:
                expected = "expected a finite number of at least 0, or None"
                raise SettingError(f"{{{name}}}: {expected}", **{name: value})
        if self.max_tokens is not None and self.max_tokens < 1:
            expected = "expected an integer of at least 1, or None for no limit"
            raise SettingError(f"{{max_tokens}}: {expected}", max_tokens=self.max_tokens)
        for name, argument, fault in (
            ("tolerance", "tolerance", " has no effect on {partitioner}: leave it None"),
            ("max_tokens", "max_tokens", ": {partitioner} has no argument max_tokens; choose another one"),
            ("equal_rows", "equal_size", ": {partitioner} has no argument equal_size to make rows equal"),
        ):
            value = getattr(self, name)
            if value is not None and value is not False and not self.takes(argument):
                raise SettingError(f"{{{name}}}{fault}", **{name: value}, partitioner=self.partitioner)

    def takes(self, argument: str, instead: Callable[..., Any] | None = None) -> bool:
        """Returns whether the partitioner, or the function `instead` of it, has an argument of this name."""
        return argument in _arguments(instead or PARTITIONERS[self.partitioner])


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
