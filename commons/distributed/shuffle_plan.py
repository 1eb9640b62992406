"""The plan: for each sample, the rank and the micro-batch that compute it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from ..partition.problem import indices_of_parts
from ..perf_model.learned_cost import rank_counts
from .loaded_samples import LoadedSamples


@dataclass(frozen=True)
class RouteEnd:
    """The samples of one rank before a transfer, or after it, in ascending order of their numbers.

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
        """Makes the end at `rank`, one of `num_ranks`; `row_bytes` is int64 `[samples]`."""
        from ..sequence_batch.row_schema import aligned  # only exchanges need it, and with it torch

        num_bytes = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(num_bytes, ranks, row_bytes)
        num_bytes[rank] = 0
        return RouteEnd(ranks, elements, aligned(num_bytes))


@dataclass(frozen=True)
class Route:
    """The samples that one rank holds before a transfer, and those it will hold after it.

    Both are in ascending order, so that two ranks agree on the order of the samples between them.
    """

    held: RouteEnd
    wanted: RouteEnd


@dataclass(frozen=True, eq=False)
class ShufflePlan(LoadedSamples):
    """The placement of one step; plain data, equal on every rank.

    Besides the samples as loaded it says where each is computed.

    Attributes:
        destination: int64 `[samples]`, the rank that computes each sample.
        micro_batch: int64 `[samples]`, the micro-batch of its rank; 0 where batches run whole.
        rows: int64 `[ranks]`, rows that each rank's batch will have, padding included; at least 1.
        num_micro_batches: micro-batches of every rank; 0 where batches run whole.
        speeds: float64 `[ranks]`, that loads were made proportional to; None if all ranks are equally fast.
        predicted_seconds: float64 `[ranks]`, compute time by costs that were fitted to times; None without.
    """

    destination: np.ndarray
    micro_batch: np.ndarray
    rows: np.ndarray
    num_micro_batches: int = 0
    speeds: np.ndarray | None = None
    predicted_seconds: np.ndarray | None = None

    _per_sample = (*LoadedSamples._per_sample, "destination", "micro_batch")

    @property
    def has_batch(self) -> bool:
        """Whether any rank loaded a batch; if none did, all loaders have ended."""
        return bool(self.batch_sizes.any())

    @property
    def num_loss_tokens(self) -> int:
        """Loss tokens of all ranks of the plan."""
        return int(self.loss_tokens.sum())

    def loss_tokens_on(self, rank: int) -> int:
        """Loss tokens of the samples that a rank computes."""
        return int(self.loss_tokens[self.computed_by(rank)].sum())

    @cached_property
    def partition(self) -> tuple[np.ndarray, ...]:
        """For each rank the ascending numbers of the samples that it computes."""
        return tuple(indices_of_parts(self.destination, self.num_ranks))

    @cached_property
    def num_placed(self) -> np.ndarray:
        """int64 `[ranks]`, samples that each rank computes; they come first in its batch."""
        return np.bincount(self.destination, minlength=self.num_ranks)

    @cached_property
    def moves(self) -> bool:
        """Whether any sample leaves its home."""
        return bool((self.home != self.destination).any())

    @property
    def loads(self) -> np.ndarray:
        """float64 `[ranks]`, sums of workloads."""
        return np.bincount(self.destination, self.workloads, minlength=self.num_ranks)

    @cached_property
    def counts(self) -> np.ndarray:
        """float64 `[ranks, 2 + columns]`, what costs are of: sums of samples, tokens, and `work`."""
        rows = self.starts_sample, self.tokens, self.work
        return rank_counts(*rows, self.destination, self.num_ranks)

    def computed_by(self, rank: int) -> np.ndarray:
        """int64, the ascending numbers of the samples that a rank computes."""
        return np.flatnonzero(self.destination == rank)

    @property
    def in_micro_batches(self) -> bool:
        """Whether ranks run their batches in micro-batches."""
        return self.num_micro_batches > 0

    def micro_batches_on(self, rank: int) -> list[np.ndarray]:
        """Returns the ascending rows of each micro-batch in a rank's batch."""
        if not self.in_micro_batches:
            return []
        return indices_of_parts(self.micro_batch[self.computed_by(rank)], self.num_micro_batches)

    def within(self, ranks: np.ndarray) -> ShufflePlan:
        """Returns the part of the plan among `ranks`, int64 and ascending, which exchange with no others."""
        if len(ranks) == self.num_ranks:
            return self
        among = super().within(ranks)
        destination = np.searchsorted(ranks, among.destination)
        of_ranks = {name: getattr(self, name) for name in ("speeds", "predicted_seconds")}
        of_ranks = {name: None if values is None else values[ranks] for name, values in of_ranks.items()}
        return replace(among, destination=destination, rows=self.rows[ranks], **of_ranks)

    def route(self, rank: int) -> Route:
        """Returns what the exchange moves from and to a rank; computed once."""
        if rank not in self._routes:
            held, wanted = self.loaded_by(rank), self.computed_by(rank)
            self._routes[rank] = Route(
                self._route_end(held, self.destination, rank), self._route_end(wanted, self.home, rank)
            )
        return self._routes[rank]

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
        values = (getattr(self, field.name) for field in fields(self))
        return [np.asarray(value) for value in values if value is not None]

    @cached_property
    def _routes(self) -> dict[int, Route]:
        return {}

    def _route_end(self, samples: np.ndarray, rank_of: np.ndarray, rank: int) -> RouteEnd:
        elements, num_bytes = self.num_elements[samples], self.sample_bytes[samples]
        return RouteEnd.of(rank_of[samples], elements, num_bytes, rank, self.num_ranks)
