"""Which sample goes to which rank, in one step or in several that are planned together."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from commons.sequence_batch.row_schema import aligned


@dataclass(frozen=True)
class RouteEnd:
    """Samples that one rank holds before a transfer, or after it, in ascending order of their numbers.

    Attributes:
        ranks: int64 `[samples]`, the rank that each goes to, or comes from.
        elements: int64 `[samples, jagged fields]`, elements of each in each jagged field.
        chunk_bytes: int64 `[ranks]`, aligned bytes to, or from, each other rank.
    """

    ranks: np.ndarray
    elements: np.ndarray
    chunk_bytes: np.ndarray

    @staticmethod
    def of(
        ranks: np.ndarray, elements: np.ndarray, row_bytes: np.ndarray, rank: int, num_ranks: int
    ) -> RouteEnd:
        """Of `rank`, among `num_ranks`; `row_bytes` int64 `[samples]`."""
        num_bytes = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(num_bytes, ranks, row_bytes)
        num_bytes[rank] = 0
        return RouteEnd(ranks, elements, aligned(num_bytes))


@dataclass(frozen=True)
class Route:
    """What a transfer moves from and to one rank: the samples that it holds, and those that it will hold.

    Both in ascending order, so that two ranks agree on the order of what goes between them.
    """

    held: RouteEnd
    wanted: RouteEnd


@dataclass(frozen=True, eq=False)
class ShufflePlan:
    """The placement of one step; plain data, equal on every rank.

    Samples are numbered over the ranks: first the real rows of rank 0, then those of rank 1, and so on.

    Attributes:
        batch_sizes: int64 `[ranks]`, rows that each rank brings; 0 where a rank has no batch.
        num_loaded: int64 `[ranks]`, real rows that each rank brings.
        workloads: int64 `[samples]`, in the shuffler's own unit.
        tokens: int64 `[samples]`.
        loss_tokens: int64 `[samples]`.
        num_elements: int64 `[samples, jagged fields]`, elements of each sample in each jagged field.
        sample_bytes: int64 `[samples]`, bytes that a sample takes when it is sent.
        partition: for each rank, the ascending numbers of the samples it will compute.
        rows: int64 `[ranks]`, rows that each rank's batch will have, padding included.
        micro_batches: for each rank and micro-batch the ascending rows of the rank's exchanged batch that are
            in it, as many micro-batches on every rank; empty where batches run whole.
    """

    batch_sizes: np.ndarray
    num_loaded: np.ndarray
    workloads: np.ndarray
    tokens: np.ndarray
    loss_tokens: np.ndarray
    num_elements: np.ndarray
    sample_bytes: np.ndarray
    partition: tuple[np.ndarray, ...]
    rows: np.ndarray
    micro_batches: tuple[tuple[np.ndarray, ...], ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks that the plan balances among."""
        return len(self.batch_sizes)

    @property
    def has_batch(self) -> bool:
        """Whether any rank loaded a batch; if none did, all loaders have ended."""
        return bool(self.batch_sizes.any())

    @property
    def num_loss_tokens(self) -> int:
        """Loss tokens of the ranks together."""
        return int(self.loss_tokens.sum())

    def loss_tokens_on(self, rank: int) -> int:
        """Loss tokens of the samples that a rank computes."""
        return int(self.loss_tokens[self.partition[rank]].sum())

    def loss_tokens_of_micro_batches(self, rank: int) -> list[int]:
        """Loss tokens of each of a rank's micro-batches."""
        placed = self.partition[rank]
        return [int(self.loss_tokens[placed[rows]].sum()) for rows in self.micro_batches[rank]]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of every rank; 0 where batches run whole."""
        return len(self.micro_batches[0]) if self.micro_batches else 0

    @cached_property
    def num_placed(self) -> np.ndarray:
        """int64 `[ranks]`, real rows that each rank's batch will have: they come first."""
        return np.array([len(samples) for samples in self.partition], dtype=np.int64)

    @cached_property
    def home(self) -> np.ndarray:
        """int64 `[samples]`, the rank that each sample was loaded on."""
        return np.repeat(np.arange(self.num_ranks), self.num_loaded)

    @cached_property
    def home_start(self) -> np.ndarray:
        """int64 `[ranks]`, number of the first sample that each rank loaded."""
        return np.cumsum(self.num_loaded) - self.num_loaded

    @cached_property
    def destination(self) -> np.ndarray:
        """int64 `[samples]`, the rank that will compute each sample."""
        return _part_of(self.partition, len(self.workloads))

    @cached_property
    def moves(self) -> bool:
        """Whether any sample leaves its home."""
        return bool((self.home != self.destination).any())

    def in_micro_batches(self, micro_batches: Sequence[Sequence[np.ndarray]]) -> ShufflePlan:
        """The plan with micro-batches: for each rank and micro-batch the numbers of its samples."""
        rows = tuple(
            tuple(np.searchsorted(placed, np.sort(numbers)) for numbers in of_rank)
            for placed, of_rank in zip(self.partition, micro_batches, strict=True)
        )
        return replace(self, micro_batches=rows)

    def with_micro_batches_of_none(self, count: int) -> ShufflePlan:
        """The plan with `count` micro-batches, the first ones empty, because ranks beyond these have so many;
        itself where it has them, or runs whole."""
        missing = count - self.num_micro_batches
        if missing <= 0 or not self.micro_batches:
            return self
        nothing = (np.zeros(0, dtype=np.int64),) * missing
        return replace(self, micro_batches=tuple(nothing + of_rank for of_rank in self.micro_batches))

    def loaded_by(self, rank: int) -> np.ndarray:
        """int64: the numbers of the samples that a rank brings."""
        return self.home_start[rank] + np.arange(self.num_loaded[rank])

    def route(self, rank: int) -> Route:
        """What the exchange moves from and to a rank; worked out once."""
        if rank not in self._routes:
            held, wanted = self.loaded_by(rank), self.partition[rank]
            self._routes[rank] = Route(
                self._route_end(held, self.destination, rank), self._route_end(wanted, self.home, rank)
            )
        return self._routes[rank]

    @cached_property
    def _routes(self) -> dict[int, Route]:
        return {}

    def _route_end(self, samples: np.ndarray, rank_of: np.ndarray, rank: int) -> RouteEnd:
        elements, num_bytes = self.num_elements[samples], self.sample_bytes[samples]
        return RouteEnd.of(rank_of[samples], elements, num_bytes, rank, self.num_ranks)

    @cached_property
    def fingerprint(self) -> int:
        """A 63-bit hash of all of it, the same in every process."""
        digest = hashlib.blake2b(digest_size=8)
        for array in self._arrays():
            digest.update(repr((array.dtype.str, array.shape)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return int.from_bytes(digest.digest(), "little") >> 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShufflePlan):
            return NotImplemented
        mine, theirs = self._arrays(), other._arrays()
        return len(mine) == len(theirs) and all(map(np.array_equal, mine, theirs))

    def _arrays(self) -> list[np.ndarray]:
        of_parts = ("partition", "micro_batches")
        arrays = [getattr(self, field.name) for field in fields(self) if field.name not in of_parts]
        return [*arrays, *self.partition, *itertools.chain(*self.micro_batches)]


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """The placement of several consecutive steps; plain data, equal on every rank.

    Each rank loads up to as many batches as there are steps, and brings to each step those of its samples
    that belong there. The window's samples are numbered over the ranks: the real rows of rank 0's batches,
    one behind the other, then those of rank 1's, and so on.

    Attributes:
        batch_sizes: int64 `[ranks, batches]`, rows that each rank loaded; 0 where it had no batch left.
        num_loaded: int64 `[ranks, batches]`, real rows of them.
        steps: the placement of each step; none if no rank had a batch left.
        samples: for each step the window's numbers of its samples, ascending.
        workloads: int64 `[samples of the window]`.
        tokens: int64 `[samples of the window]`.
    """

    batch_sizes: np.ndarray
    num_loaded: np.ndarray
    steps: tuple[ShufflePlan, ...]
    samples: tuple[np.ndarray, ...]
    workloads: np.ndarray
    tokens: np.ndarray

    @cached_property
    def home(self) -> np.ndarray:
        """int64 `[samples]`, the rank that loaded each sample."""
        return np.repeat(np.arange(len(self.num_loaded)), self.num_loaded.sum(1))

    @cached_property
    def batch_of(self) -> np.ndarray:
        """int64 `[samples]`, which of its rank's batches each sample was in."""
        ranks, batches = self.num_loaded.shape
        return np.repeat(np.tile(np.arange(batches), ranks), self.num_loaded.ravel())

    @cached_property
    def step_of(self) -> np.ndarray:
        """int64 `[samples]`, the step that computes each sample."""
        return _part_of(self.samples, len(self.workloads))

    @property
    def mean_loss_tokens(self) -> float:
        """Loss tokens of a step of the ranks together, on average over the window."""
        return sum(step.num_loss_tokens for step in self.steps) / max(len(self.steps), 1)

    def where_loaded(self, sample: int) -> tuple[int, int, int]:
        """The rank that loaded a sample, which of its batches it was in, and the row there."""
        rank, batch = int(self.home[sample]), int(self.batch_of[sample])
        before = int(self.num_loaded[:rank].sum() + self.num_loaded[rank, :batch].sum())
        return rank, batch, sample - before

    def rows_for_step(self, rank: int, step: int) -> np.ndarray:
        """int64: what a rank brings to a step, as positions among all rows of the batches it loaded."""
        numbers = np.flatnonzero(self.home == rank)
        batch = self.batch_of[numbers]
        within = np.arange(len(numbers)) - (np.cumsum(self.num_loaded[rank]) - self.num_loaded[rank])[batch]
        first = (np.cumsum(self.batch_sizes[rank]) - self.batch_sizes[rank])[batch]
        return (first + within)[self.step_of[numbers] == step]

    def rows_of_batch(self, rank: int, batch: int) -> np.ndarray:
        """int64: a batch's samples, as positions among all that the rank brought to step 0, 1, and so on."""
        mine = self.home == rank
        by_step = np.argsort(self.step_of[mine], kind="stable")
        position = np.empty_like(by_step)
        position[by_step] = np.arange(len(by_step))
        return position[self.batch_of[mine] == batch]

    def loaded_per_rank(self, amounts: np.ndarray, step: int) -> np.ndarray:
        """float64 `[ranks]`: amounts `[samples]`, summed over each rank's batch number `step`."""
        chosen = self.batch_of == step
        return np.bincount(self.home[chosen], amounts[chosen], minlength=len(self.num_loaded))


def one_step(plan: ShufflePlan) -> WindowPlan:
    """A window of one step, or of none if no rank has a batch."""
    return WindowPlan(
        batch_sizes=plan.batch_sizes[:, None],
        num_loaded=plan.num_loaded[:, None],
        steps=(plan,) if plan.has_batch else (),
        samples=(np.arange(len(plan.workloads)),) if plan.has_batch else (),
        workloads=plan.workloads,
        tokens=plan.tokens,
    )


def _part_of(parts: Sequence[np.ndarray], num_samples: int) -> np.ndarray:
    """int64 `[samples]`, the part that has each sample."""
    part_of = np.empty(num_samples, dtype=np.int64)
    for part, samples in enumerate(parts):
        part_of[samples] = part
    return part_of


def empty_plan(num_ranks: int, num_jagged_fields: int) -> ShufflePlan:
    """The plan of a step for which these ranks have no batches: each has one row that is no sample."""
    nothing = np.zeros(0, dtype=np.int64)
    return ShufflePlan(
        batch_sizes=np.zeros(num_ranks, dtype=np.int64),
        num_loaded=np.zeros(num_ranks, dtype=np.int64),
        workloads=nothing,
        tokens=nothing,
        loss_tokens=nothing,
        num_elements=np.zeros((0, num_jagged_fields), dtype=np.int64),
        sample_bytes=nothing,
        partition=(nothing,) * num_ranks,
        rows=np.ones(num_ranks, dtype=np.int64),
    )
