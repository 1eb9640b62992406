"""Ranks compare what they have worked out: for debugging, and for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from commons.distributed.failures import portable, raise_first
from commons.distributed.rank_group import RankGroup, all_gather_row
from commons.distributed.shuffle_plan import ShufflePlan, WindowPlan
from commons.sequence_batch.packed_rows import PackedRows, row_elements
from commons.sequence_batch.row_schema import RowSchema


def check_plans(group: RankGroup, place: Callable[[], WindowPlan]) -> WindowPlan:
    """What `place` returns, once all ranks have the same. Collective; for the thread that plans.

    Raises:
        RuntimeError: the plans differ.
        Exception: what `place` raised on the first rank where it did, on every rank.
    """
    window: WindowPlan | None = None
    failure: Exception | None = None
    try:
        window = place()
    except Exception as error:  # raised again on all ranks below
        failure = error
    mine = -1 if window is None else _fingerprint(window)
    fingerprints = group.all_gather(np.array([mine]))[:, 0]
    if (fingerprints < 0).any():
        raise_first(group.all_gather_objects(portable(failure)), failure, group.rank)
    if window is None:
        raise RuntimeError("planning failed on a rank that gave no cause")
    _raise_if_different(fingerprints)
    return window


def check_same_plan(group: RankGroup, plan: ShufflePlan) -> None:
    """Compares what ranks are about to carry out. Collective; for the main thread.

    Raises:
        RuntimeError: the plans differ; on every rank.
    """
    _raise_if_different(all_gather_row(np.array([plan.fingerprint]), group.checks)[:, 0])


def check_placed_samples(group: RankGroup, plan: ShufflePlan, rows: PackedRows) -> None:
    """Compares each rank's samples after the exchange with the plan. Collective; for the main thread.

    Args:
        group: the ranks.
        plan: the placement.
        rows: this rank's real rows.

    Raises:
        RuntimeError: a rank has more or fewer samples, or of other lengths; on every rank.
    """
    planned = plan.num_elements[plan.partition[group.rank]]
    elements = row_elements(rows.lengths.cpu(), rows.schema).numpy()
    wrong = len(planned) - int((elements == planned).all(1).sum()) if len(elements) == len(planned) else 0
    table = all_gather_row(np.array([rows.num_rows, wrong]), group.checks)
    for rank in np.flatnonzero(table[:, 0] != plan.num_placed)[:1]:
        raise RuntimeError(
            f"rank {rank} of the ranks to balance among has {table[rank, 0]} samples after the exchange, "
            f"planned were {plan.num_placed[rank]}"
        )
    for rank in np.flatnonzero(table[:, 1])[:1]:
        raise RuntimeError(
            f"rank {rank} of the ranks to balance among has {table[rank, 1]} samples after the exchange that "
            "are not as long as those that were planned"
        )


def check_same_schema(group: RankGroup, schema: RowSchema) -> None:
    """Compares what ranks are about to return. Collective; for the main thread.

    Raises:
        RuntimeError: they differ; on every rank.
    """
    fingerprints = all_gather_row(np.array([schema.fingerprint]), group.checks)[:, 0]
    for rank in np.flatnonzero(fingerprints != fingerprints[0])[:1]:
        raise RuntimeError(
            f"ranks return values of different kinds: rank {rank} differs from rank 0; rank {group.rank} "
            f"has {schema.fields}"
        )


def _raise_if_different(fingerprints: np.ndarray) -> None:
    for rank in np.flatnonzero(fingerprints != fingerprints[0])[:1]:
        raise RuntimeError(
            f"ranks have different plans for one step: its hash is {fingerprints[0]:#x} on rank 0 and "
            f"{fingerprints[rank]:#x} on rank {rank} of the ranks to balance among. Every rank must work out "
            "the same from the same numbers: check that all run the same code and versions"
        )


def _fingerprint(window: WindowPlan) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for array in (window.batch_sizes, window.num_loaded, *window.samples):
        digest.update(np.ascontiguousarray(array).tobytes())
    for step in window.steps:
        digest.update(step.fingerprint.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1
