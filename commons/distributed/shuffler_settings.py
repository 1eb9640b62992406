"""The core's settings of a shuffler: how it places samples, and how ranks exchange them."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .. import NAME
from ..checks import SettingError, UnknownSettingError, check_types
from ..partition import karmarkar_karp, longest_processing_time, rebalance, refined

logger = logging.getLogger(__name__)
# To add a partitioner, add a row, here or from your own module. It is called with those of these arguments
# that its signature names: workloads, num_partitions, home (the rank that loaded each sample), sizes (bytes
# to move each), ranks_per_node, speeds, equal_size, tolerance, tokens, max_tokens, token_tolerance, and those
# of extensions, such as groups. All but the first two need defaults, because None is not passed. It returns
# the same on every rank: for each rank the indices of its samples, or int64 `[samples]`, the rank of each.
PARTITIONERS: dict[str, Callable[..., Any]] = {
    "karmarkar_karp": karmarkar_karp,
    "longest_processing_time": longest_processing_time,
    "rebalance": rebalance,
    "refined": refined,
}
OWN_PARTITIONERS = frozenset(PARTITIONERS)

EXCHANGE_NAMES = ("all_gather", "all_to_all")


@dataclass(frozen=True)
class ShufflerSettings:
    """How a shuffler places samples and exchanges them.

    Shufflers take these fields as keyword arguments. `TrainerArgs` has them as `balance_<field>`, with the
    same defaults and checks.

    Attributes:
        partitioner: a key of `PARTITIONERS`. "rebalance" moves few samples, fewest across nodes, and keeps
            groups together. "refined" comes as near the lower bound as it can and moves nearly every sample.
            "longest_processing_time" and "karmarkar_karp" are the usual heuristics.
        tolerance: the largest load may be (1 + tolerance) × the lower bound. None means 0 for "refined" and
            0.01 for "rebalance"; the others take none.
        equal_rows: every rank computes the same number of rows (real ones within one of each other). If
            False, rows follow the load.
        max_tokens: tokens per rank at most, as `get_tokens` counts them; None for no limit. A batch that
            cannot be placed under it is an error on every rank.
        token_tolerance: the fullest rank may have (1 + token_tolerance) × the mean tokens, as far as the
            target load allows it, for at most 4% more samples moved, and others of their groups. It bounds
            activations where `max_tokens` does not, and never fails. Partitioners without the argument ignore
            it. None to leave tokens alone.
        exchange: "all_to_all" sends each sample straight to its destination. "all_gather" sends all samples
            to all ranks.

    Raises:
        TypeError: a value does not have the type of its annotation.
        KeyError: unknown partitioner or exchange.
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
        self._check_choices()
        self._check_ranges()
        self._check_effects()

    def takes(self, argument: str) -> bool:
        """Whether the partitioner has an argument of this name."""
        return argument in _arguments(PARTITIONERS[self.partitioner])

    def _check_choices(self) -> None:
        for name, known in (("partitioner", PARTITIONERS), ("exchange", EXCHANGE_NAMES)):
            value = getattr(self, name)
            if value not in known:
                raise UnknownSettingError(f"unknown {{{name}}}; there are {sorted(known)}", **{name: value})

    def _check_ranges(self) -> None:
        for name in ("tolerance", "token_tolerance"):
            tolerance = getattr(self, name)
            if tolerance is not None and not 0 <= tolerance < np.inf:
                expected = "expected a finite number of at least 0, or None"
                raise SettingError(f"{{{name}}}: {expected}", **{name: tolerance})
        if self.max_tokens is not None and self.max_tokens < 1:
            raise SettingError(
                "{max_tokens}: expected an integer of at least 1, or None for no limit",
                max_tokens=self.max_tokens,
            )

    def _check_effects(self) -> None:
        for name, argument, fault in (
            ("tolerance", "tolerance", " has no effect on {partitioner}: leave it None"),
            ("max_tokens", "max_tokens", ": {partitioner} has no argument max_tokens; choose another one"),
            ("equal_rows", "equal_size", ": {partitioner} has no argument equal_size to make rows equal"),
        ):
            value = getattr(self, name)
            if value is not None and value is not False and not self.takes(argument):
                raise SettingError(f"{{{name}}}{fault}", **{name: value}, partitioner=self.partitioner)


def make_settings(shuffler: str, given: Mapping[str, Any]) -> ShufflerSettings:
    """Makes the settings of a shuffler's keyword arguments; raises a TypeError for an unknown one."""
    known = [field.name for field in fields(ShufflerSettings)]
    for name in given:
        if name not in known:
            raise TypeError(f"{shuffler} has no setting {name!r}; there are {sorted(known)}")
    return ShufflerSettings(**given)


def faster_placement(settings: ShufflerSettings) -> str:
    """Returns what to set, for a faster placement."""
    if settings.partitioner == "longest_processing_time":
        return "balance among fewer ranks, as those of one node, with process_group="
    remedy = 'set partitioner="longest_processing_time" (TrainerArgs.balance_partitioner)'
    if settings.takes("tolerance"):
        remedy += ", or raise tolerance (TrainerArgs.balance_tolerance)"
    return remedy


def warn_of_unread_method(shuffler: Any, read: Set[str]) -> None:
    """Warns on rank 0 of a shuffler's `get_groups` that no extension reads, as none had to before."""
    if hasattr(shuffler, "get_groups") and "get_groups" not in read and shuffler.group.rank == 0:
        logger.warning(
            f"{type(shuffler).__name__}.get_groups has no effect without extensions=[SampleGroups()], of "
            f"{NAME}.extensions.sample_groups"
        )


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
