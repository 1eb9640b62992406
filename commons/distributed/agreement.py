"""Ranks compare what they have worked out: for debugging, and for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.failures import portable, raise_first
from commons.distributed.rank_group import RankGroup
from commons.distributed.shuffle_plan import ShufflePlan, WindowPlan


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
        raise_first(group.all_gather_objects(portable(failure, group.rank)), failure, group.rank)
    different = np.flatnonzero(fingerprints != fingerprints[0])
    if window is None or different.size:
        rank = different[0]
        raise RuntimeError(
            f"ranks have different plans for one step: its hash is {fingerprints[0]:#x} on rank 0 and "
            f"{fingerprints[rank]:#x} on rank {rank} of the ranks to balance among. Every rank must work out "
            "the same from the same numbers: check that all run the same code and versions"
        )
    return window


def check_placed_samples(group: RankGroup, plan: ShufflePlan, num_samples: int) -> None:
    """Compares the samples of every rank's exchanged batch with the plan. Collective; for the main thread.

    Raises:
        RuntimeError: a rank has more or fewer; on every rank.
    """
    counts = torch.empty(group.num_ranks, dtype=torch.int64)
    dist.all_gather_into_tensor(counts, torch.tensor([num_samples]), group=group.checks)
    different = np.flatnonzero(counts.numpy() != plan.num_placed)
    if different.size:
        rank = different[0]
        raise RuntimeError(
            f"rank {rank} of the ranks to balance among has {int(counts[rank])} samples after the exchange, "
            f"planned were {plan.num_placed[rank]}"
        )


def _fingerprint(window: WindowPlan) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for array in (window.batch_sizes, window.num_loaded, *window.samples):
        digest.update(np.ascontiguousarray(array).tobytes())
    for step in window.steps:
        digest.update(step.fingerprint.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1
