"""The plan: for each row, the rank that computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..partition.problem import indices_of_parts
from ..perf_model.cost import Cost, sum_counts
from .row_table import RowTable

if TYPE_CHECKING:
    from ..sequence_batch.packed_rows import Selection

# Name of the column in `RowTable.columns` with each row's micro-batch on its rank, if `num_parts` is not 0.
MICRO_BATCH = "micro_batch"


@dataclass(frozen=True)
class RankLoads:
    """Loads of ranks that are not sums over their rows, as in models that pad rows to the longest one."""

    before: np.ndarray  # float64 [ranks], as loaded
    after: np.ndarray  # float64 [ranks], as placed
    least: float  # largest load of the best placement


@dataclass(frozen=True, eq=False)
class JobStep:
    """Facts about a step that all ranks of a job know, even if only some of them exchange.

    Attributes mean the same as in `ShufflePlan`, over all ranks of the job. Loads follow the shuffler's cost,
    because each set of ranks may learn a cost of its own.

    Attributes:
        posts: posts of extensions with a `take` hook, `[ranks]`, with a field for each extension.
        total_load: sum of all workloads, float64.
    """

    has_batch: bool
    num_loss_tokens: int | float
    num_placed: np.ndarray
    loads_before: np.ndarray
    loads: np.ndarray
    posts: np.ndarray
    total_load: float

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the job."""
        return len(self.num_placed)


@dataclass(frozen=True)
class Route:
    """The rows that one rank sends, receives, and ends up with, computed on the host.

    Attributes:
        leaving: chunks of rows to send, one per receiving rank or one for all. None means no collective.
        sent_bytes, received_bytes: bytes to and from each rank.
        arriving: sending ranks, ascending, each with the lengths of its rows, int64 `[rows, keys]`.
        keeps: whether `placed` selects from the rows that the rank held, followed by the arriving rows. If
            False, it selects only from the arriving rows.
        placed: rows that the rank ends up with, padding included.
        gathers: whether an all-gather sends the rows of every rank to all ranks, padded to equal sizes.
    """

    leaving: Selection | None
    sent_bytes: list[int]
    received_bytes: list[int]
    arriving: list[tuple[int, np.ndarray]]
    keeps: bool
    placed: Selection
    gathers: bool = False

    def pinned(self) -> Route:
        """Returns the route with its indices in pinned memory."""
        leaving = None if self.leaving is None else self.leaving.pinned()
        return replace(self, leaving=leaving, placed=self.placed.pinned())

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that this rank sends to other ranks, and receives from them."""
        first = int(self.gathers)  # one of the equal sizes is for its own bytes
        return sum(self.sent_bytes[first:]), sum(self.received_bytes[first:])


@dataclass(frozen=True, eq=False)
class ShufflePlan:
    """The placement of one step: plain data, equal on all ranks of the plan but for `route`.

    Attributes:
        rows: rows that the ranks loaded. Pieces replace the samples that were cut.
        destination: int64 `[rows]`, the rank that computes each row.
        num_rows: int64 `[ranks]`, rows of each rank's exchanged batch, padding included; at least 1.
        predicted_seconds: float64 `[ranks]`, compute time by a cost fitted to times. None without one.
        num_parts: number of micro-batches on every rank. 0 means that batches run whole.
        job: facts about the step that all ranks of the job know. None if the plan covers all ranks, or if no
            pipeline shares these facts.
        rank_loads: loads of ranks, from an extension. None if they are the sums of their rows' workloads.
        route: rows that this rank sends and receives. None if samples never move, or outside a shuffler.
    """

    rows: RowTable
    destination: np.ndarray
    num_rows: np.ndarray
    predicted_seconds: np.ndarray | None = None
    num_parts: int = 0
    job: JobStep | None = None
    rank_loads: RankLoads | None = None
    route: Route | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the plan."""
        return self.rows.num_ranks

    @property
    def whole(self) -> ShufflePlan | JobStep:
        """The step over all ranks that plan in step: `job` if it is known, otherwise this plan."""
        return self if self.job is None else self.job

    @property
    def has_batch(self) -> bool:
        """Whether any rank of the plan loaded a batch. If not, the loaders of all its ranks have ended."""
        return bool(self.rows.batch_sizes.any())

    @cached_property
    def num_loss_tokens(self) -> int | float:
        """Loss tokens of all ranks of the plan. A float if they are weights."""
        return sum_loss_tokens(self.rows.loss_tokens)

    def loss_tokens_on(self, rank: int) -> int | float:
        """Returns the loss tokens of the rows that a rank computes."""
        return sum_loss_tokens(self.rows.loss_tokens[self.computed_by(rank)])

    @cached_property
    def partition(self) -> tuple[np.ndarray, ...]:
        """Numbers of the rows that each rank computes, ascending, one array per rank."""
        return tuple(indices_of_parts(self.destination, self.num_ranks))

    @cached_property
    def num_placed(self) -> np.ndarray:
        """int64 `[ranks]`, number of rows that each rank computes. They come first in its batch."""
        return np.bincount(self.destination, minlength=self.num_ranks)

    @cached_property
    def moves(self) -> bool:
        """Whether any row leaves its home."""
        return bool((self.rows.home != self.destination).any())

    @property
    def loads_before(self) -> np.ndarray:
        """float64 `[ranks]`, sum of the workloads that each rank loaded, or `rank_loads`."""
        return self._sums(self.rows.home) if self.rank_loads is None else self.rank_loads.before

    @property
    def loads(self) -> np.ndarray:
        """float64 `[ranks]`, sum of the workloads that each rank computes, or `rank_loads`."""
        return self._sums(self.destination) if self.rank_loads is None else self.rank_loads.after

    def _sums(self, rank_of: np.ndarray) -> np.ndarray:
        return np.bincount(rank_of, self.rows.workloads, minlength=self.num_ranks)

    @property
    def total_load(self) -> float:
        """Sum of all workloads."""
        return float(self.rows.workloads.sum(dtype=np.float64))

    @cached_property
    def counts(self) -> np.ndarray:
        """float64 `[ranks, 2 + columns]`, sums of the counts in a cost: samples, tokens, and `work`."""
        rows = self.rows
        return sum_counts(rows.starts_sample, rows.tokens, rows.work, self.destination, self.num_ranks)

    def computed_by(self, rank: int) -> np.ndarray:
        """Returns the ascending numbers of the rows that a rank computes, int64."""
        return np.flatnonzero(self.destination == rank)

    def with_seconds(self, cost: Cost, speeds: np.ndarray | float = 1.0) -> ShufflePlan:
        """Returns the plan with the compute time that a cost predicts for each rank at its speed."""
        return replace(self, predicted_seconds=(cost.per_step + self.loads) * 1e-9 / speeds)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShufflePlan):
            return NotImplemented
        mine, others = self.arrays(), other.arrays()
        return len(mine) == len(others) and all(map(np.array_equal, mine, others))

    def arrays(self) -> list[np.ndarray]:
        """Returns the arrays that make up the plan, without `job`."""
        values = (self.destination, self.num_rows, self.predicted_seconds, np.array([self.num_parts]))
        return self.rows.arrays() + [value for value in values if value is not None]


def sum_loss_tokens(loss_tokens: np.ndarray) -> int | float:
    """Returns the sum of int64 or float64 `[rows]`, which does not depend on the order of rows.

    Raises:
        OverflowError: the integers add up to 2**63 or more.
    """
    if loss_tokens.dtype.kind == "f":
        return math.fsum(loss_tokens)
    if loss_tokens.sum(dtype=np.float64) >= 2.0**63:
        total = sum(loss_tokens.tolist())
        raise OverflowError(f"loss tokens add up to {total}, more than int64 holds: check get_loss_tokens")
    return int(loss_tokens.sum())
