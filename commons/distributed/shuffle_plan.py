"""The plan: for each sample, the rank, the step and the micro-batch that compute it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from commons.distributed.loaded_samples import LoadedSamples
from commons.partition.problem import indices_of_parts


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
        from commons.sequence_batch.row_schema import aligned  # only exchanges need it, and with it torch

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
    """The placement of one step, or of a window of steps; plain data, equal on every rank.

    Besides the samples as loaded it says where each is computed. `steps` has a plan for each step, in which
    samples are numbered anew.

    Attributes:
        destination: int64 `[samples]`, the rank that computes each sample.
        step: int64 `[samples]`, the step that computes each sample.
        micro_batch: int64 `[samples]`, the micro-batch of its rank and step; 0 where batches run whole.
        rows: int64 `[ranks, steps]`, rows that each rank's batch will have, padding included; at least 1.
        micro_batch_counts: int64 `[steps]`, micro-batches of every rank; 0 where batches run whole.
        speeds: float64 `[ranks]`, that loads were made proportional to; None if all ranks are equally fast.
        predicted_seconds: float64 `[ranks, steps]`, compute time by learned costs; None without these.
    """

    destination: np.ndarray
    step: np.ndarray
    micro_batch: np.ndarray
    rows: np.ndarray
    micro_batch_counts: np.ndarray
    speeds: np.ndarray | None = None
    predicted_seconds: np.ndarray | None = None

    _per_sample = (*LoadedSamples._per_sample, "destination", "step", "micro_batch")

    @property
    def num_steps(self) -> int:
        """Steps that the plan is for."""
        return self.rows.shape[1]

    @property
    def has_batch(self) -> bool:
        """Whether any rank loaded a batch; if none did, all loaders have ended."""
        return bool(self.batch_sizes.any())

    @property
    def num_loss_tokens(self) -> int:
        """Loss tokens of all ranks of the plan, in all its steps."""
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
        """int64 `[ranks]`, samples that each rank computes; in one step they come first in its batch."""
        return np.bincount(self.destination, minlength=self.num_ranks)

    @cached_property
    def moves(self) -> bool:
        """Whether any sample leaves its home."""
        return bool((self.home != self.destination).any())

    @property
    def loads(self) -> np.ndarray:
        """float64 `[ranks, steps]`, sums of workloads."""
        slots = self.destination * self.num_steps + self.step
        return np.bincount(slots, self.workloads, minlength=self.num_ranks * self.num_steps).reshape(
            self.num_ranks, self.num_steps
        )

    def computed_by(self, rank: int) -> np.ndarray:
        """int64, the ascending numbers of the samples that a rank computes."""
        return np.flatnonzero(self.destination == rank)

    @property
    def in_micro_batches(self) -> bool:
        """Whether ranks run their batches in micro-batches."""
        return bool(self.micro_batch_counts.any())

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of every rank in a plan of one step; 0 where batches run whole."""
        return int(self.micro_batch_counts[0])

    def micro_batches_on(self, rank: int) -> list[np.ndarray]:
        """Returns the ascending rows of each micro-batch in a rank's batch, in a plan of one step."""
        if not self.in_micro_batches:
            return []
        return indices_of_parts(self.micro_batch[self.computed_by(rank)], self.num_micro_batches)

    @property
    def steps(self) -> tuple[ShufflePlan, ...]:
        """The plan of each step. Its batches are what ranks bring to that step: see `positions_for_step`."""
        return (self,) if self.num_steps == 1 else self._steps  # cached, (self,) would be a cycle

    def check_one_step(self, user: str) -> None:
        """Raises a ValueError unless the plan is of one step; `user` names the caller in the message."""
        if self.num_steps > 1:
            raise ValueError(
                f"{user} got a plan of {self.num_steps} steps, and takes one of its plan.steps at a time"
            )

    def loss_tokens_of_step(self, step: int) -> int:
        """Loss tokens of all ranks of the plan in one step."""
        return int(self.loss_tokens[self.step == step].sum())

    def within(self, ranks: np.ndarray) -> ShufflePlan:
        """Returns the part of the plan among `ranks`, int64 and ascending, which exchange with no others."""
        if len(ranks) == self.num_ranks:
            return self
        among = super().within(ranks)
        destination = np.searchsorted(ranks, among.destination)
        of_ranks = {name: getattr(self, name) for name in ("speeds", "predicted_seconds")}
        of_ranks = {name: None if values is None else values[ranks] for name, values in of_ranks.items()}
        return replace(among, destination=destination, rows=self.rows[ranks], **of_ranks)

    @cached_property
    def keeps_batches(self) -> np.ndarray:
        """bool `[ranks]`, whether a rank brings each batch to its own step as loaded, padding and all."""
        crossing = np.bincount(self.home, self.step != self.batch_of, minlength=self.num_ranks)
        return crossing == 0

    def positions_for_step(self, rank: int, step: int) -> np.ndarray:
        """int64, what a rank brings to a step, as positions among all rows of the batches it loaded."""
        numbers = self.loaded_by(rank)
        batch = self.batch_of[numbers]
        within = np.arange(len(numbers)) - (np.cumsum(self.num_loaded[rank]) - self.num_loaded[rank])[batch]
        first = (np.cumsum(self.batch_sizes[rank]) - self.batch_sizes[rank])[batch]
        return (first + within)[self.step[numbers] == step]

    def rows_of_batch(self, rank: int, batch: int) -> np.ndarray:
        """int64, a batch's samples, as positions among all that the rank brought to step 0, 1, and so on."""
        mine = self.loaded_by(rank)
        by_step = np.argsort(self.step[mine], kind="stable")
        position = np.empty_like(by_step)
        position[by_step] = np.arange(len(by_step))
        return position[self.batch_of[mine] == batch]

    def route(self, rank: int) -> Route:
        """Returns what the exchange of a one-step plan moves from and to a rank; computed once."""
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
        arrays = (getattr(self, field.name) for field in fields(self))
        return [array for array in arrays if array is not None]

    def _step(self, step: int) -> ShufflePlan:
        among = self._of_samples(np.flatnonzero(self.step == step))
        brought = np.bincount(self.home[self.step == step], minlength=self.num_ranks)
        return replace(
            among,
            batch_sizes=np.where(self.keeps_batches, self.batch_sizes[:, step], brought)[:, None],
            num_loaded=brought[:, None],
            step=np.zeros_like(among.step),
            rows=self.rows[:, [step]],
            micro_batch_counts=self.micro_batch_counts[[step]],
            predicted_seconds=None if self.predicted_seconds is None else self.predicted_seconds[:, [step]],
        )

    @cached_property
    def _steps(self) -> tuple[ShufflePlan, ...]:
        return tuple(self._step(number) for number in range(self.num_steps))

    @cached_property
    def _routes(self) -> dict[int, Route]:
        return {}

    def _route_end(self, samples: np.ndarray, rank_of: np.ndarray, rank: int) -> RouteEnd:
        elements, num_bytes = self.num_elements[samples], self.sample_bytes[samples]
        return RouteEnd.of(rank_of[samples], elements, num_bytes, rank, self.num_ranks)
