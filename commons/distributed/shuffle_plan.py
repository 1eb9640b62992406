"""The plan: for each row, the rank that computes it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..partition.problem import indices_of_parts
from ..perf_model.cost import sum_counts
from .row_table import RowTable, join_tables


@dataclass(frozen=True, eq=False)
class ShufflePlan:
    """The placement of one step; plain data, equal on every rank.

    Attributes:
        rows: what the ranks loaded, with pieces in the places of cut samples.
        destination: int64 `[rows]`, the rank that computes each row.
        num_rows: int64 `[ranks]`, rows that each rank's batch will have, padding included; at least 1.
        predicted_seconds: float64 `[ranks]`, compute time by costs that were fitted to times; None without.
        step: what features know of the step as a whole, by name.
    """

    rows: RowTable
    destination: np.ndarray
    num_rows: np.ndarray
    predicted_seconds: np.ndarray | None = None
    step: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Ranks of the plan."""
        return self.rows.num_ranks

    @property
    def has_batch(self) -> bool:
        """Whether any rank loaded a batch; if none did, all loaders have ended."""
        return bool(self.rows.batch_sizes.any())

    @cached_property
    def num_loss_tokens(self) -> int | float:
        """Loss tokens of all ranks of the plan; a float where they are weights."""
        return sum_loss_tokens(self.rows.loss_tokens)

    def loss_tokens_on(self, rank: int) -> int | float:
        """Loss tokens of the rows that a rank computes."""
        return sum_loss_tokens(self.rows.loss_tokens[self.computed_by(rank)])

    @cached_property
    def partition(self) -> tuple[np.ndarray, ...]:
        """For each rank the ascending numbers of the rows that it computes."""
        return tuple(indices_of_parts(self.destination, self.num_ranks))

    @cached_property
    def num_placed(self) -> np.ndarray:
        """int64 `[ranks]`, rows that each rank computes; they come first in its batch."""
        return np.bincount(self.destination, minlength=self.num_ranks)

    @cached_property
    def moves(self) -> bool:
        """Whether any row leaves its home."""
        return bool((self.rows.home != self.destination).any())

    @property
    def loads(self) -> np.ndarray:
        """float64 `[ranks]`, sums of workloads."""
        return np.bincount(self.destination, self.rows.workloads, minlength=self.num_ranks)

    @cached_property
    def counts(self) -> np.ndarray:
        """float64 `[ranks, 2 + columns]`, what costs are of: sums of samples, tokens, and `work`."""
        rows = self.rows
        return sum_counts(rows.starts_sample, rows.tokens, rows.work, self.destination, self.num_ranks)

    def computed_by(self, rank: int) -> np.ndarray:
        """int64, the ascending numbers of the rows that a rank computes."""
        return np.flatnonzero(self.destination == rank)

    def within(self, ranks: np.ndarray) -> ShufflePlan:
        """Returns the part of the plan among `ranks`, int64 and ascending, which exchange with no others."""
        if len(ranks) == self.num_ranks:
            return self
        seconds = self.predicted_seconds
        return replace(
            self,
            rows=self.rows.within(ranks),
            destination=np.searchsorted(ranks, self.destination[self.rows.loaded_by(ranks)]),
            num_rows=self.num_rows[ranks],
            predicted_seconds=None if seconds is None else seconds[ranks],
        )

    @cached_property
    def fingerprint(self) -> int:
        """A 63-bit hash of the whole plan, the same in every process."""
        digest = hashlib.blake2b(digest_size=8)
        for array in self._arrays():
            digest.update(repr((array.dtype.str, array.shape)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return int.from_bytes(digest.digest(), "little") >> 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShufflePlan):
            return NotImplemented
        mine, others = self._arrays(), other._arrays()
        return len(mine) == len(others) and all(map(np.array_equal, mine, others))

    def _arrays(self) -> list[np.ndarray]:
        step_numbers = np.array([self.step[name] for name in sorted(self.step)], dtype=np.int64)
        values = (self.destination, self.num_rows, self.predicted_seconds, step_numbers)
        return self.rows.arrays() + [value for value in values if value is not None]


def sum_loss_tokens(loss_tokens: np.ndarray) -> int | float:
    """Returns the sum of int64 or float64 `[rows]`, which does not depend on their order.

    Raises:
        OverflowError: integers add up to 2**63 or more.
    """
    if loss_tokens.dtype.kind == "f":
        return math.fsum(loss_tokens)
    if loss_tokens.sum(dtype=np.float64) >= _MOST_TOKENS:
        raise OverflowError(
            f"loss tokens add up to {sum(loss_tokens.tolist())}, more than int64 holds; get_loss_tokens "
            "counts the labels of each row"
        )
    return int(loss_tokens.sum())


_MOST_TOKENS = 2.0**63


def join_plans(plans: Sequence[tuple[np.ndarray, ShufflePlan]]) -> ShufflePlan:
    """Puts the plans of sets of ranks that exchange among themselves into one; each rank is in one set."""
    num_ranks = sum(len(ranks) for ranks, _ in plans)
    num_rows = np.zeros(num_ranks, dtype=np.int64)
    for ranks, plan in plans:
        num_rows[ranks] = plan.num_rows
    rows = join_tables([(ranks, plan.rows) for ranks, plan in plans])
    destination = np.zeros(len(rows.home), dtype=np.int64)
    for ranks, plan in plans:
        destination[rows.loaded_by(ranks)] = ranks[plan.destination]
    step = {name: value for _, plan in plans for name, value in plan.step.items()}
    return ShufflePlan(rows, destination, num_rows, step=step)
