"""A warning where planning takes longer than the steps that should hide it."""

from __future__ import annotations

import logging

import numpy as np

from .planner import Planner
from .shuffler_settings import ShufflerSettings

logger = logging.getLogger(__name__)
_WARM_UP = 10  # steps
_STEPS = 32


class SlowPlans:
    """Warns once, on rank 0, if planning takes longer than a step, by medians over 32 steps.

    The times are used for nothing else.

    Args:
        planner: makes the plans.
        settings: by which it makes them.
        shuffler: name of the class that counts workloads.
    """

    def __init__(self, planner: Planner, settings: ShufflerSettings, shuffler: str) -> None:
        self._planner, self._settings, self._shuffler = planner, settings, shuffler
        self._steps_to_skip: float = _WARM_UP if planner.rank == 0 else np.inf
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
            slow = f"make {self._shuffler}.get_workloads faster"
            logger.warning(
                f"planning takes {planning:.1f} ms per step, and a step that should hide it {busy:.1f} ms: "
                f"every step waits for its plan; {slow if counting > placing else _faster(self._settings)}"
            )


def _faster(settings: ShufflerSettings) -> str:
    """Returns what to set, for a faster placement."""
    if settings.split:
        return "set split=False (TrainerArgs.balance_split)"
    if settings.partitioner == "longest_processing_time":
        return "balance among fewer ranks, as those of one node, with process_group="
    remedy = 'set partitioner="longest_processing_time" (TrainerArgs.balance_partitioner)'
    if settings.takes("tolerance"):
        remedy += ", or raise tolerance (TrainerArgs.balance_tolerance)"
    return remedy
