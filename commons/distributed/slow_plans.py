"""A warning where planning takes longer than the steps that should hide it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .batch_shuffler import BatchShuffler

logger = logging.getLogger(__name__)
_WARM_UP = 10  # steps
_STEPS = 32


class SlowPlans:
    """Warns once, on rank 0, if planning takes longer than a step, by medians over 32 steps.

    The times are used for nothing else.

    Args:
        shuffler: counts workloads, and makes the plans.
    """

    def __init__(self, shuffler: BatchShuffler) -> None:
        self._shuffler, self._planner = shuffler, shuffler.planner
        self._steps_to_skip: float = _WARM_UP if self._planner.ranks.rank == 0 else np.inf
        self._times: list[tuple[float, float, float]] = []

    def after(self, busy_seconds: float) -> None:
        """Notes a step, which the training thread computed in `busy_seconds` before it asked for the next."""
        if self._steps_to_skip > 0:
            self._steps_to_skip -= 1
            return
        self._times.append((*self._planner.seconds, busy_seconds))
        if len(self._times) < _STEPS:
            return
        counting, placing, busy = 1e3 * np.median(self._times, axis=0)
        self._times.clear()
        planning = counting + placing
        if planning > busy:
            self._steps_to_skip = np.inf
            slow = f"make {type(self._shuffler).__name__}.get_workloads faster"
            logger.warning(
                f"planning takes {planning:.1f} ms per step, and a step that should hide it {busy:.1f} ms: "
                f"every step waits for its plan; {slow if counting > placing else _faster(self._shuffler)}"
            )


def _faster(shuffler: BatchShuffler) -> str:
    """Returns what to set, for a faster placement."""
    for feature in shuffler.features:
        if feature.faster_without:
            return feature.faster_without
    settings = shuffler.settings
    if settings.partitioner == "longest_processing_time":
        return "balance among fewer ranks, as those of one node, with process_group="
    remedy = 'set partitioner="longest_processing_time" (TrainerArgs.balance_partitioner)'
    if settings.takes("tolerance"):
        remedy += ", or raise tolerance (TrainerArgs.balance_tolerance)"
    return remedy
