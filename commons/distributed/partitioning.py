"""Calls of the partitioner that the settings name: which rank computes each sample."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..partition.problem import number_of_part, token_goal
from ..partition.workloads import MOST_TOKENS
from .loaded_samples import LoadedSamples
from .shuffler_settings import PARTITIONERS, ShufflerSettings


@dataclass(frozen=True)
class Partitioning:
    """How samples of one step are partitioned among the ranks that loaded them.

    Attributes:
        settings: of the shuffler.
        ranks_per_node: consecutive ranks per node, where moves across nodes cost more; None if they do not.
        speeds: float64 `[ranks]`, 1.0 for the fastest; None if all ranks are equally fast.
    """

    settings: ShufflerSettings
    ranks_per_node: int | None = None
    speeds: np.ndarray | None = None

    def rank_of(self, samples: LoadedSamples) -> np.ndarray:
        """Returns int64 `[samples]`, the rank of each.

        Keeps samples as loaded if the partitioner does no better, in load or in tokens above their tolerance,
        unless it brings groups together.

        Raises:
            ValueError: `max_rows` or `max_tokens` cannot be kept, or no placement that keeps them was found.
            RuntimeError: as `partition`.
        """
        max_tokens, token_tolerance = self.settings.max_tokens, self.token_tolerance(samples)
        _check_tokens(samples, max_tokens)
        rank_of = self.partition(
            workloads=samples.workloads,
            num_partitions=samples.num_ranks,
            home=samples.home,
            sizes=samples.sample_bytes,
            groups=samples.groups,
            tolerance=self.settings.tolerance,
            tokens=None if max_tokens is None and token_tolerance is None else samples.tokens,
            max_tokens=max_tokens,
            token_tolerance=token_tolerance,
        )
        if samples.groups is not None and self.settings.takes("groups"):
            return rank_of
        home = samples.home
        stays = (
            self.allows(samples, home)
            and self.longest_time(samples, home) <= self.longest_time(samples, rank_of)
            and self.excess_tokens(samples, home) <= self.excess_tokens(samples, rank_of)
        )
        return home.copy() if stays else rank_of

    def partition(self, workloads: np.ndarray, **arguments: Any) -> np.ndarray:
        """Returns int64 `[samples]`, the rank of each, whatever the samples' tokens.

        Args:
            workloads: int64 `[samples]`.
            arguments: of the partitioner, besides those from the settings; it gets those that it takes.

        Raises:
            RuntimeError: the partitioner, which may be a user's, did not return one array of indices per
                rank, with each sample once, within the limits that it was given.
        """
        arguments |= {
            "workloads": workloads,
            "ranks_per_node": self.ranks_per_node,
            "speeds": self.speeds,
            "equal_size": self.settings.equal_rows,
            "max_rows": self.settings.max_rows,
            "moves_per_copy": self.settings.moves_per_copy,
        }
        takes = self.settings.takes
        given = {name: value for name, value in arguments.items() if value is not None and takes(name)}
        partition = PARTITIONERS[self.settings.partitioner](**given)
        try:
            parts = list(partition)
            rank_of = number_of_part(parts, len(workloads))
            fault = self._fault(rank_of, len(parts), arguments["num_partitions"], given.get("tokens"))
        except (TypeError, ValueError) as error:
            fault = str(error)
        if fault:
            raise RuntimeError(
                f"partitioner {self.settings.partitioner!r} returned {reprlib.repr(partition)}: {fault}"
            )
        return rank_of

    def allows(self, samples: LoadedSamples, rank_of: np.ndarray) -> bool:
        """Whether the limits allow the samples on these ranks, int64 `[samples]`."""
        return not self._fault(rank_of, samples.num_ranks, samples.num_ranks, samples.tokens)

    def _fault(self, rank_of: np.ndarray, num_parts: int, num_ranks: int, tokens: np.ndarray | None) -> str:
        """Returns what keeps samples from being on these ranks, int64 `[samples]`; empty if nothing does."""
        max_rows, max_tokens = self.settings.max_rows, self.settings.max_tokens
        rows = np.bincount(rank_of, minlength=num_parts)
        if num_parts != num_ranks:
            return f"{num_parts} parts, expected one for each of {num_ranks} ranks"
        if self.settings.equal_rows and np.ptp(rows) > 1:
            sizes = f"{rows.min()} to {rows.max()}"
            return f"parts of {sizes} samples, expected equal_size=True to make them differ by one at most"
        if max_rows is not None and rows.max() > max_rows:
            return f"a part of {rows.max()} samples, above max_rows={max_rows}"
        if max_tokens is not None and tokens is not None:
            most = int(np.bincount(rank_of, tokens, 1).max())
            if most > max_tokens:
                return f"a part of {most} tokens, above max_tokens={max_tokens}"
        return ""

    def longest_time(self, samples: LoadedSamples, rank_of: np.ndarray) -> float:
        """Returns the largest load ÷ speed, where the samples are on these ranks, int64 `[samples]`.

        It adds one by one, as bincount does, so that all processors get the same last bit.
        """
        return float(self.times(np.bincount(rank_of, samples.workloads, minlength=samples.num_ranks)).max())

    def token_tolerance(self, samples: LoadedSamples) -> float | None:
        """Returns that of the settings; None where nothing heeds it, or tokens are too many to be added."""
        most = int(samples.tokens.max(initial=0)) * len(samples.tokens)
        return self.settings.heeded_token_tolerance if most < MOST_TOKENS else None

    def excess_tokens(self, samples: LoadedSamples, rank_of: np.ndarray) -> int:
        """Returns the fullest rank's tokens above the tolerated ones, with `rank_of` int64 `[samples]`."""
        tolerance = self.token_tolerance(samples)
        if tolerance is None:
            return 0
        goal = token_goal(int(samples.tokens.sum()), samples.num_ranks, tolerance)
        return max(int(np.bincount(rank_of, samples.tokens, minlength=1).max()) - goal, 0)

    def times(self, loads: np.ndarray) -> np.ndarray:
        """Returns loads ÷ speeds, float64 `[ranks]`."""
        return loads if self.speeds is None else loads / self.speeds


def _check_tokens(samples: LoadedSamples, max_tokens: int | None) -> None:
    """Raises what the partitioner would, with the rank and row of the sample."""
    over = np.flatnonzero(samples.tokens > (max_tokens or np.inf))
    if over.size:
        rank, row = samples.where_loaded(over[0])
        raise ValueError(
            f"row {row} of rank {rank} has {samples.tokens[over[0]]} tokens, above "
            f"max_tokens={max_tokens}: truncate histories or raise the limit"
        )
