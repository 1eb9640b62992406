"""Compares plans and exchanged samples across ranks, for debugging and tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...distributed.extension import Extension, Fields, Place
from ...distributed.plan import RowTable, ShufflePlan
from ...sequence_batch.fields import hash_bytes, num_rows
from ...sequence_batch.packed_rows import PackedRows, Selection, select_rows, to_chunks

if TYPE_CHECKING:
    from ...distributed.shuffler import BatchShuffler


class Verification(Extension):
    """Checks that all ranks make the same plan, and that every exchange keeps all samples intact.

    `plan` takes one more all-gather of host numbers, and another one among ranks that compute together.
    `exchange` takes two, and synchronizes host and device.
    """

    name = "verification"
    order = 0
    verifies = True

    def setup(self, shuffler: BatchShuffler) -> None:
        """Makes one channel for planning and one for exchanges, which run in different threads."""
        self._view, self._rank = shuffler.view, shuffler.group.rank
        self._planning, self._exchanging = shuffler.group.channel(), shuffler.group.channel()
        self._together = shuffler.together.channel()  # whose ranks make the same plan, each in its own group

    def place(self, rows: RowTable, place: Place) -> ShufflePlan:
        """Returns the plan. If plans differ, every rank raises a RuntimeError, and if placement failed on a
        rank, every rank raises the first such error."""
        failure: Exception | None = None
        try:
            plan = place(rows)
            mine = fingerprint(plan)
        except Exception as error:
            failure, mine = error, -1
        fingerprints = self._planning.all_gather(np.array([mine]))[:, 0]
        if (fingerprints < 0).any():
            self._planning.all_gather_objects(None, failure)  # raises the failure on all ranks
        _raise_if_different(fingerprints)
        if self._together.num_ranks > 1:
            _raise_if_different(self._together.all_gather(np.array([mine]))[:, 0], "that compute together")
        return plan

    def around_exchange(
        self, rows: PackedRows, plan: ShufflePlan, exchange: Callable[[PackedRows, ShufflePlan], Fields]
    ) -> Fields:
        """Exchanges rows if all ranks have equal plans. Otherwise, raises a RuntimeError on every rank."""
        _raise_if_different(self._exchanging.all_gather(np.array([fingerprint(plan)]))[:, 0])
        fields, planned = exchange(rows, plan), int(plan.num_rows[self._rank])
        counts = [num_rows(name, field) for name, field in fields.items()]
        self._loaded = rows
        self._more = next((count for count in counts if count != planned), planned) - planned
        # A batch with the wrong number of rows would fail on this rank, while the others wait to compare.
        return select_rows([rows], np.zeros(0, dtype=np.int64), planned) if self._more else fields

    def after_exchange(self, batch: Any, plan: ShufflePlan) -> Any:
        """Raises a RuntimeError on every rank if a rank has another number of samples than planned, or if a
        sample has changed since it was loaded."""
        view = self._view(batch)
        here, own = plan.computed_by(self._rank), plan.rows.loaded_by(self._rank)
        num_samples = min(view.num_samples, len(here)) if not view.pads else view.num_samples
        changed = np.zeros(len(plan.rows.workloads), dtype=np.int64)
        changed[own] = _row_hashes(self._loaded)[: len(own)]
        if num_samples == len(here):
            changed[here] -= _row_hashes(view.packed())[:num_samples]
        numbers = np.append(num_samples + self._more, changed)
        _raise_if_wrong(self._exchanging.all_gather(numbers), plan)
        return batch


def fingerprint(plan: ShufflePlan) -> int:
    """Returns a 63-bit hash of a plan without `job`, the same in every process."""
    arrays = [np.ascontiguousarray(array) for array in plan.arrays()]
    return hash_bytes(b"".join(f"{of.dtype.str} {of.shape}".encode() + of.tobytes() for of in arrays))


def _raise_if_wrong(table: np.ndarray, plan: ShufflePlan) -> None:
    """Raises a RuntimeError for the first rank, or else the first row, that is wrong after the exchange.

    `table` is int64 `[ranks, 1 + rows]`: a rank's number of samples, then for each row of the step the hash
    of the row that the rank loaded, minus the hash of the row that it has now.
    """
    for rank in np.flatnonzero(table[:, 0] != plan.num_placed)[:1]:
        raise RuntimeError(
            f"rank {rank} of the ranks to balance among has {table[rank, 0]} samples after the exchange, "
            f"expected {plan.num_placed[rank]}"
        )
    for number in np.flatnonzero(table[:, 1:].sum(0))[:1]:
        home, row = plan.rows.where_loaded(number)
        raise RuntimeError(
            f"row {row} of rank {home} has changed in the exchange to rank {plan.destination[number]}, with "
            "ranks numbered among those that balance together"
        )


def _raise_if_different(fingerprints: np.ndarray, which: str = "to balance among") -> None:
    for rank in np.flatnonzero(fingerprints != fingerprints[0])[:1]:
        raise RuntimeError(
            f"ranks have different plans for one step: its hash is {fingerprints[0]:#x} on rank 0 and "
            f"{fingerprints[rank]:#x} on rank {rank} of the ranks {which}. Every rank must compute "
            "the same from the same numbers: check that all run the same code and versions"
        )


def _row_hashes(packed: PackedRows) -> np.ndarray:
    """Returns a hash of the lengths and words of each row, int64 `[rows]`."""
    rows = np.arange(len(packed.lengths))
    selection = Selection.of(packed.schema, [packed.lengths], np.split(rows, len(rows)))
    words = to_chunks(packed, selection).cpu().numpy()
    contents = zip(packed.lengths, np.split(words, np.cumsum(selection.chunk_bytes)[:-1]), strict=True)
    return np.array([hash_bytes(lengths.tobytes() + row.tobytes()) for lengths, row in contents])
