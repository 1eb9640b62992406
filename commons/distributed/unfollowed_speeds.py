"""Settings that keep loads from following the speeds of ranks."""

from __future__ import annotations

import numpy as np

from ..partition import imbalance, refined
from ..partition.balance import relative_to_mean
from .shuffle_plan import ShufflePlan
from .shuffler_settings import ShufflerSettings

# Ranks differ in speed if the fastest is this many times as fast as the slowest.
_DIFFERENT = 1.25
# Loads follow speeds if the slowest rank takes at most this share longer than it has to.
_FOLLOWED = 0.05


def speed_ratio(speeds: np.ndarray) -> float:
    """Returns how many times as fast the fastest rank is as the slowest."""
    return float(speeds.max() / speeds.min())


def falls_behind(loads: np.ndarray, speeds: np.ndarray) -> bool:
    """Whether ranks that exchange samples differ in speed, and some take longer than others in a step."""
    return speed_ratio(speeds) > _DIFFERENT and relative_to_mean(loads, speeds) > 1 + _FOLLOWED


def what_keeps_loads(plan: ShufflePlan, settings: ShufflerSettings) -> str | None:
    """Returns the setting that keeps loads from following speeds, and what to do about it.

    Args:
        plan: of a step that falls behind, among ranks that exchange samples.
        settings: that it was made by.

    Returns:
        None if no other setting would do better, or it is not known which.
    """
    if _gains(plan, settings.equal_rows):
        partitioner = settings.partitioner
        if partitioner == "karmarkar_karp" or not settings.takes("speeds"):
            return f'{partitioner=} does not take speeds into account. Choose "rebalance"'
        if settings.tolerance is not None and settings.tolerance > _FOLLOWED:
            return f"tolerance={settings.tolerance} does not ask for it. Lower it"
        limits = {"max_rows": settings.max_rows, "max_tokens": settings.max_tokens}
        tight = ", ".join(f"{name}={limit}" for name, limit in limits.items() if limit is not None)
        return f"limits are tight ({tight}). Raise them" if tight else None
    if settings.equal_rows and _gains(plan, False):
        return "equal_rows=True gives every rank as many samples. Set equal_rows=False"
    return None


def _gains(plan: ShufflePlan, equal_size: bool) -> bool:
    """Whether the slowest rank takes clearly less time without limits of rows and tokens."""
    found = refined(plan.workloads, plan.num_ranks, equal_size, speeds=plan.speeds)
    return imbalance(plan.workloads, found, plan.speeds) * (1 + _FOLLOWED) < relative_to_mean(
        plan.loads, plan.speeds
    )
