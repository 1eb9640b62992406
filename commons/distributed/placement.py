"""Which rank computes which sample: a partition algorithm by name, and what a rank's batch has to keep to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commons.partition import (
    balance_window,
    divide_into_micro_batches,
    karmarkar_karp,
    longest_processing_time,
    lower_bound,
    rebalance,
    refined,
)

PARTITIONERS = ("karmarkar_karp", "longest_processing_time", "rebalance", "refined")
DEFAULT_PARTITIONER = "refined"
_TAKE_TOLERANCE = ("rebalance", "refined")


@dataclass(frozen=True)
class LoadedSamples:
    """The samples of a global batch as the ranks loaded them, in the order of the ranks.

    Attributes:
        workloads, tokens, sizes: int64 `[samples]`; sizes are bytes to move.
        batch_sizes, num_loaded: int64 `[ranks]`, rows and real rows that each rank loaded.
    """

    workloads: np.ndarray
    tokens: np.ndarray
    sizes: np.ndarray
    batch_sizes: np.ndarray
    num_loaded: np.ndarray


@dataclass(frozen=True)
class Placement:
    """How samples are placed.

    Attributes:
        partitioner: one of `PARTITIONERS`.
        tolerance: the largest load may be (1 + tolerance) × the lower bound; None for the partitioner's own:
            0.01 for "rebalance", 0 for "refined". The others take none.
        equal_rows: every rank gets the same number of rows (±1 real ones); else rows follow the load.
        max_rows: real rows of a rank at most, where they follow the load.
        max_tokens: tokens of a rank at most.
        window: consecutive steps that are placed together.
        window_max_step_ratio: a step's total is at most this times the window's mean; None for no limit.
        max_tokens_per_micro_batch: tokens of a micro-batch at most; None for batches that run whole.
        small_micro_batches_at_ends: whether the lightest micro-batches come first and last, not only first.

    Raises:
        KeyError: an unknown partitioner.
        ValueError: a value is out of range, or has no effect with the others.
    """

    partitioner: str
    tolerance: float | None
    equal_rows: bool
    max_rows: int | None
    max_tokens: int | None
    window: int = 1
    window_max_step_ratio: float | None = None
    max_tokens_per_micro_batch: int | None = None
    small_micro_batches_at_ends: bool = False

    def __post_init__(self) -> None:
        if self.partitioner not in PARTITIONERS:
            raise KeyError(f"unknown partitioner {self.partitioner!r}; there are {list(PARTITIONERS)}")
        if self.tolerance is not None and self.partitioner not in _TAKE_TOLERANCE:
            raise ValueError(
                f"tolerance={self.tolerance} has no effect on {self.partitioner!r}: leave it None"
            )
        if self.tolerance is not None and not 0 <= self.tolerance < np.inf:
            raise ValueError(f"tolerance={self.tolerance}: expected a finite number of at least 0")
        for name in ("max_rows", "max_tokens", "max_tokens_per_micro_batch"):
            cap = getattr(self, name)
            if cap is not None and not (isinstance(cap, int | np.integer) and cap >= 1):
                raise ValueError(
                    f"{name}={cap}: expected at least 1, as a whole number, or None for no limit"
                )
            if (
                name != "max_tokens_per_micro_batch"
                and cap is not None
                and self.partitioner == "karmarkar_karp"
            ):
                raise ValueError(
                    f"{name}={cap}: 'karmarkar_karp' keeps no limits; choose another partitioner"
                )
        if self.max_rows is not None and self.equal_rows:
            raise ValueError(f"max_rows={self.max_rows} has no effect with equal_rows=True")
        if self.small_micro_batches_at_ends and self.max_tokens_per_micro_batch is None:
            raise ValueError("small_micro_batches_at_ends has no effect without max_tokens_per_micro_batch")
        self._check_window()

    def place(self, loaded: LoadedSamples, ranks_per_node: int | None = None) -> list[np.ndarray]:
        """For each rank the ascending numbers of its samples; as loaded where the partitioner does no better.

        Raises:
            ValueError: `max_rows` or `max_tokens` cannot be kept, or no placement that does was found.
        """
        num_ranks = len(loaded.num_loaded)
        as_loaded = np.split(np.arange(len(loaded.workloads)), np.cumsum(loaded.num_loaded)[:-1])
        if num_ranks == 1:
            return as_loaded
        self._check_tokens(loaded)
        settings: dict[str, Any] = {"equal_size": self.equal_rows}
        if self.tolerance is not None:
            settings["tolerance"] = self.tolerance
        if self.max_tokens is not None:
            settings.update(tokens=loaded.tokens, max_tokens=self.max_tokens)
        if self.max_rows is not None:
            settings["max_rows"] = self.max_rows
        if self.partitioner == "rebalance":
            home = np.repeat(np.arange(num_ranks), loaded.num_loaded)
            return rebalance(
                loaded.workloads,
                home,
                num_ranks,
                sizes=loaded.sizes,
                ranks_per_node=ranks_per_node,
                **settings,
            )
        algorithm = {
            "karmarkar_karp": karmarkar_karp,
            "longest_processing_time": longest_processing_time,
            "refined": refined,
        }[self.partitioner]
        placed = algorithm(loaded.workloads, num_ranks, **settings)
        stays = self._allows(loaded) and _largest_load(loaded, as_loaded) <= _largest_load(loaded, placed)
        return as_loaded if stays else placed

    def place_in_micro_batches(
        self, loaded: LoadedSamples, ranks_per_node: int | None = None
    ) -> list[list[np.ndarray]]:
        """For each rank and micro-batch the ascending numbers of its samples.

        Raises:
            ValueError: as `place` does.
        """
        placed = self.place(loaded, ranks_per_node)
        return self.divide_into_micro_batches(loaded.workloads, loaded.tokens, placed)

    def divide_into_micro_batches(
        self,
        workloads: np.ndarray,
        tokens: np.ndarray,
        partition: Sequence[np.ndarray],
    ) -> list[list[np.ndarray]]:
        """The same of samples `[samples]` that are placed on ranks already: `partition` has those of each."""
        divided = divide_into_micro_batches(workloads, tokens, partition, self._micro_batch_cap)
        return self._ordered(divided)

    def place_window(self, loaded: LoadedSamples, num_steps: int) -> list[list[np.ndarray]]:
        """For each step and rank the ascending numbers of its samples."""
        return balance_window(
            loaded.workloads,
            len(loaded.num_loaded),
            num_steps,
            self.window_max_step_ratio,
            equal_size=self.equal_rows,
        )

    def rows(self, total_rows: int, num_steps: int, partition: list[np.ndarray], pads: bool) -> np.ndarray:
        """int64 `[ranks]`: the rows of each rank's batch in one of the steps, padding included.

        Args:
            total_rows: rows that all ranks loaded for all the steps.
            num_steps: steps that are placed together.
            partition: the samples of each rank in this step.
            pads: whether batches know their padding, so that they may get some.
        """
        if self.equal_rows and pads:
            return np.full(len(partition), max(-(-total_rows // (len(partition) * num_steps)), 1))
        return np.array([max(len(samples), 1) for samples in partition])

    def warm_up(self) -> None:
        """Compiles what is compiled, or loads it if it was before, so that no step has to wait for it."""
        ones, home = np.ones(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
        rebalance(ones, home, 2)  # rows have to be made equal
        rebalance(ones, home, 2, equal_size=False, tokens=ones, max_tokens=1)  # a limit has to be met
        refined(ones, 2)
        balance_window(ones, 1, 2)
        refined(ones, 2, tokens=ones, max_tokens=1)
        longest_processing_time(ones, 2)
        lower_bound(ones, 2)  # for reports
        if self.max_tokens_per_micro_batch is not None:
            divide_into_micro_batches(ones, ones, [np.arange(2)], 1)

    @property
    def _micro_batch_cap(self) -> int:
        if self.max_tokens_per_micro_batch is None:
            raise ValueError("there are no micro-batches: max_tokens_per_micro_batch is None")
        return self.max_tokens_per_micro_batch

    def _ordered(self, micro_batches: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        if self.small_micro_batches_at_ends:
            return [[*of_rank[::2], *of_rank[1::2][::-1]] for of_rank in micro_batches]
        return micro_batches

    def _check_window(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window}: expected at least 1")
        if self.window_max_step_ratio is not None:
            if self.window == 1:
                raise ValueError(
                    f"window_max_step_ratio={self.window_max_step_ratio} has no effect with window=1"
                )
            if not self.window_max_step_ratio >= 1:
                raise ValueError(
                    f"window_max_step_ratio={self.window_max_step_ratio}: expected at least 1, or None"
                )
        if self.window > 1:
            for name in ("tolerance", "max_rows", "max_tokens"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect with window={self.window}, which "
                        "balance_window places: leave it None"
                    )
            if self.partitioner != DEFAULT_PARTITIONER:
                raise ValueError(
                    f"partitioner={self.partitioner!r} has no effect with window={self.window}, which "
                    "balance_window places: leave it out"
                )

    def _check_tokens(self, loaded: LoadedSamples) -> None:
        """What the partition algorithms would say, with the rank and row of the sample."""
        over = np.flatnonzero(loaded.tokens > (self.max_tokens or np.inf))
        if over.size:
            ends = np.cumsum(loaded.num_loaded)
            rank = int(np.searchsorted(ends, over[0], side="right"))
            row = int(over[0] - ends[rank] + loaded.num_loaded[rank])
            raise ValueError(
                f"row {row} of rank {rank} has {loaded.tokens[over[0]]} tokens, above "
                f"max_tokens={self.max_tokens}: truncate histories or raise the limit"
            )

    def _allows(self, loaded: LoadedSamples) -> bool:
        """Whether the samples may stay where they were loaded."""
        rank_of = np.repeat(np.arange(len(loaded.num_loaded)), loaded.num_loaded)
        tokens = np.bincount(rank_of, loaded.tokens, minlength=1)
        even = not self.equal_rows or np.ptp(loaded.num_loaded) <= 1
        few = self.max_rows is None or loaded.num_loaded.max() <= self.max_rows
        return even and few and (self.max_tokens is None or tokens.max() <= self.max_tokens)


def _largest_load(loaded: LoadedSamples, partition: list[np.ndarray]) -> float:
    """Added up one by one, as bincount does, so that all processors get the same last bit."""
    rank_of = np.repeat(np.arange(len(partition)), [len(samples) for samples in partition])
    return float(np.bincount(rank_of, loaded.workloads[np.concatenate(partition)], minlength=1).max())
