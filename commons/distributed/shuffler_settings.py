"""The settings of a shuffler: how it places samples, and how ranks exchange them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import InitVar, dataclass

import numpy as np

from .. import NAME
from ..checks import check_types
from ..partition import karmarkar_karp, longest_processing_time, rebalance, refined
from ..partition.groups import MOVES_PER_COPY, check_moves_per_copy

# To add a partitioner, add a row, here or from your own module. It returns int64 index arrays, one per rank.
# It is called with those of these arguments that its signature names: workloads, num_partitions, home (the
# rank that loaded each sample), sizes (bytes to move each), ranks_per_node, groups, moves_per_copy, speeds,
# equal_size, tolerance, max_rows, tokens, max_tokens, token_tolerance. All but the first two need defaults,
# because None is not passed.
# `commons.partition.rebalance` has them all. A setting without an argument is refused. What it returns is
# checked: each sample once, and the limits. It has to return the same on every rank.
PARTITIONERS: dict[str, Callable[..., list[np.ndarray]]] = {
    "karmarkar_karp": karmarkar_karp,
    "longest_processing_time": longest_processing_time,
    "rebalance": rebalance,
    "refined": refined,
}

EXCHANGE_NAMES = ("all_gather", "all_to_all")
MAX_SPEED_LIMIT = 30  # so that two ranks differ by less than MAX_SPEED_RATIO
# The cost that follows the times of the training's steps.
LEARNED = "learned"


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
        max_rows: samples per rank at most, where rows follow the load; None for no limit.
        max_tokens: tokens per rank at most, as `get_tokens` counts them; None for no limit. A batch that
            cannot be placed under it is an error on every rank.
        token_tolerance: the fullest rank may have (1 + token_tolerance) × the mean tokens, as far as the
            largest load allows it, for at most 4% more samples moved. It bounds activations where
            `max_tokens` does not, and never fails. Partitioners without the argument, and micro-batches,
            ignore it. None to leave tokens alone.
        group_feature: name of a feature of a `BaseBatch`, such as the user's id. Samples with the same first
            value of it belong together: their ids are looked up once if one rank has them. An empty row
            belongs to no group. None for no groups, or for those of `get_groups`.
        moves_per_copy: what it is worth to have a group on one rank fewer: as much as moving its largest
            sample this many times. It is the bytes of embeddings and gradients that ranks exchange for an id
            of all tables ÷ the bytes of a sample per id. 64 is one table of 128 float32, and an id with an
            action.
        exchange: "all_to_all" sends each sample straight to its destination. "all_gather" sends all samples
            to all ranks.
        verify: ranks compare a hash of every plan, and the samples of every exchanged batch. For debugging:
            it adds an all-gather to `plan`, two to `exchange`, and host-device synchronizations.
        max_tokens_per_micro_batch: divides each rank's samples into micro-batches of at most this many
            tokens, the same number on every rank. Pipelines run them one after another. A longer sample gets
            a micro-batch of its own, and a warning names it. None for batches that run whole.
        split: cuts samples that are too long for balance, or for `max_tokens`, into pieces on several ranks.
            The model and its batches have to support it.
        speed_limit: with learned costs, a rank's speed is taken to be at most this times, and at least 1 /
            this times, the median rank's: its rows and memory follow it. 1.0 for equal speeds.

    `window=1` and `window_max_step_ratio=None` are accepted, because configurations have them.

    Raises:
        TypeError: a value does not have the type of its annotation.
        KeyError: unknown partitioner or exchange.
        ValueError: a value is out of range, or has no effect in combination with the others.
    """

    partitioner: str = "rebalance"
    tolerance: float | None = None
    equal_rows: bool = True
    max_rows: int | None = None
    max_tokens: int | None = None
    token_tolerance: float | None = 0.10
    group_feature: str | None = None
    moves_per_copy: float = MOVES_PER_COPY
    exchange: str = "all_to_all"
    verify: bool = False
    max_tokens_per_micro_batch: int | None = None
    split: bool = False
    speed_limit: float = 2.0
    window: InitVar[int] = 1
    window_max_step_ratio: InitVar[float | None] = None

    def __post_init__(self, window: int, window_max_step_ratio: float | None) -> None:
        _check_no_window(window, window_max_step_ratio)
        check_types(self)
        self._check_choices()
        self._check_ranges()
        self._check_effects()
        self._check_split()

    def takes(self, argument: str) -> bool:
        """Whether the partitioner has an argument of this name."""
        return argument in _arguments_of(PARTITIONERS[self.partitioner])

    @property
    def heeded_token_tolerance(self) -> float | None:
        """The token tolerance; None where the partitioner or micro-batches ignore it."""
        is_heeded = self.takes("token_tolerance") and self.max_tokens_per_micro_batch is None
        return self.token_tolerance if is_heeded else None

    def _check_choices(self) -> None:
        if self.partitioner not in PARTITIONERS:
            raise KeyError(f"unknown partitioner {self.partitioner!r}; there are {sorted(PARTITIONERS)}")
        if self.exchange not in EXCHANGE_NAMES:
            raise KeyError(f"unknown exchange {self.exchange!r}; there are {sorted(EXCHANGE_NAMES)}")

    def _check_ranges(self) -> None:
        for name in ("tolerance", "token_tolerance"):
            tolerance = getattr(self, name)
            if tolerance is not None and not 0 <= tolerance < np.inf:
                raise ValueError(f"{name}={tolerance}: expected a finite number of at least 0, or None")
        for name in ("max_rows", "max_tokens", "max_tokens_per_micro_batch"):
            cap = getattr(self, name)
            if cap is not None and cap < 1:
                raise ValueError(f"{name}={cap}: expected an integer of at least 1, or None for no limit")
        check_moves_per_copy(self.moves_per_copy)
        if not 1 <= self.speed_limit <= MAX_SPEED_LIMIT:
            raise ValueError(
                f"speed_limit={self.speed_limit}: expected 1 to {MAX_SPEED_LIMIT}, times as fast as the "
                "median rank"
            )

    def _check_effects(self) -> None:
        if self.tolerance is not None and not self.takes("tolerance"):
            raise ValueError(
                f"tolerance={self.tolerance} has no effect on {self.partitioner!r}: leave it None"
            )
        for name in ("max_rows", "max_tokens", "group_feature"):
            argument = "groups" if name == "group_feature" else name
            if getattr(self, name) is not None and not self.takes(argument):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: {self.partitioner!r} has no argument {argument}; "
                    'choose another partitioner, such as "rebalance"'
                )
        if self.moves_per_copy != MOVES_PER_COPY and not self.takes("moves_per_copy"):
            raise ValueError(
                f"moves_per_copy={self.moves_per_copy} has no effect on {self.partitioner!r}: leave it "
                f"{MOVES_PER_COPY:g}"
            )
        if self.equal_rows and not self.takes("equal_size"):
            raise ValueError(
                f"equal_rows=True: {self.partitioner!r} has no argument equal_size to make rows equal; set "
                "equal_rows=False"
            )
        if self.max_rows is not None and self.equal_rows:
            raise ValueError(f"max_rows={self.max_rows} has no effect with equal_rows=True")

    def _check_split(self) -> None:
        if not self.split:
            return
        if self.equal_rows:
            raise ValueError(
                "split=True: a piece takes a row, and rows follow the load; set equal_rows=False"
            )
        if self.max_tokens_per_micro_batch is not None:
            raise ValueError(
                "split=True: pieces of a sample are computed at once, and max_tokens_per_micro_batch="
                f"{self.max_tokens_per_micro_batch} divides a step; leave it out"
            )


def _check_no_window(window: int, max_step_ratio: float | None) -> None:
    """Refuses to plan several steps together, and names what else balances them."""
    if window == 1 and max_step_ratio is None:
        return
    given = f"window={window!r}" if window != 1 else f"window_max_step_ratio={max_step_ratio!r}"
    raise ValueError(
        f"{given}: each step is planned by itself; leave it out. Where steps stay unbalanced, cut long "
        "samples into pieces (split=True), give each rank more rows, or load samples of similar length "
        f"together ({NAME}.datasets.BucketSampler). Code that holds several batches can divide them over "
        f"steps by {NAME}.partition.balance_window"
    )


@functools.cache
def _arguments_of(function: Callable[..., list[np.ndarray]]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
