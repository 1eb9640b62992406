"""Checks that ranks agree on plans and on what they exchanged; for debugging and tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from commons.distributed.channel import Channel
from commons.distributed.failures import portable, raise_first
from commons.distributed.shuffle_plan import ShufflePlan
from commons.sequence_batch.packed_rows import PackedRows, row_elements
from commons.sequence_batch.row_schema import RowSchema


def check_plans(channel: Channel, place: Callable[[], ShufflePlan]) -> ShufflePlan:
    """Returns the plan of `place`, once all ranks have the same. Collective; for the planning thread.

    Raises:
        RuntimeError: the plans differ.
        Exception: the error of `place` on the first rank that has one, on every rank.
    """
    plan: ShufflePlan | None = None
    failure: Exception | None = None
    try:
        plan = place()
    except Exception as error:  # raised again on all ranks below
        failure = error
    mine = -1 if plan is None else plan.fingerprint
    fingerprints = channel.all_gather(np.array([mine]))[:, 0]
    if (fingerprints < 0).any():
        raise_first(channel.all_gather_objects(portable(failure)), failure, channel.rank)
    if plan is None:
        raise RuntimeError("planning failed on a rank that gave no cause")
    _raise_if_different(fingerprints)
    return plan


def check_same_plan(channel: Channel, plan: ShufflePlan) -> None:
    """Compares the plans that ranks are about to carry out. Collective; for the main thread.

    Raises:
        RuntimeError: the plans differ; on every rank.
    """
    _raise_if_different(channel.all_gather(np.array([plan.fingerprint]))[:, 0])


def check_placed_samples(channel: Channel, plan: ShufflePlan, rows: PackedRows) -> None:
    """Compares each rank's samples after the exchange with the plan. Collective; for the main thread.

    Args:
        channel: of the ranks.
        plan: the placement.
        rows: this rank's real rows.

    Raises:
        RuntimeError: a rank has more or fewer samples, or of other lengths; on every rank.
    """
    planned = plan.num_elements[plan.computed_by(channel.rank)]
    elements = row_elements(rows.lengths.cpu(), rows.schema).numpy()
    wrong = len(planned) - int((elements == planned).all(1).sum()) if len(elements) == len(planned) else 0
    table = channel.all_gather(np.array([rows.num_rows, wrong]))
    for rank in np.flatnonzero(table[:, 0] != plan.num_placed)[:1]:
        raise RuntimeError(
            f"rank {rank} of the ranks to balance among has {table[rank, 0]} samples after the exchange, "
            f"expected {plan.num_placed[rank]}"
        )
    for rank in np.flatnonzero(table[:, 1])[:1]:
        raise RuntimeError(
            f"rank {rank} of the ranks to balance among has {table[rank, 1]} samples after the exchange that "
            "are not as long as planned"
        )


def check_same_schema(channel: Channel, schema: RowSchema) -> None:
    """Compares the kinds of values that ranks are about to return. Collective; for the main thread.

    Raises:
        RuntimeError: they differ; on every rank.
    """
    fingerprints = channel.all_gather(np.array([schema.fingerprint]))[:, 0]
    for rank in np.flatnonzero(fingerprints != fingerprints[0])[:1]:
        raise RuntimeError(
            f"ranks return values of different kinds: rank {rank} differs from rank 0; rank {channel.rank} "
            f"has {schema.fields}"
        )


def _raise_if_different(fingerprints: np.ndarray) -> None:
    for rank in np.flatnonzero(fingerprints != fingerprints[0])[:1]:
        raise RuntimeError(
            f"ranks have different plans for one step: its hash is {fingerprints[0]:#x} on rank 0 and "
            f"{fingerprints[rank]:#x} on rank {rank} of the ranks to balance among. Every rank must compute "
            "the same from the same numbers: check that all run the same code and versions"
        )
