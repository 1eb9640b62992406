"""Settings that keep loads from following the speeds of ranks."""

from __future__ import annotations

import numpy as np

from commons.distributed.shuffle_plan import ShufflePlan
from commons.distributed.shuffler_settings import ShufflerSettings
from commons.partition import imbalance, refined
from commons.partition.balance import relative_to_mean

# Loads follow speeds if the slowest rank takes at most this share longer than it has to.
_FOLLOWED = 0.05
# A rank with this share of `max_tokens` has hardly any room left.
_FULL = 0.9


def follows_speeds(plan: ShufflePlan, settings: ShufflerSettings) -> bool:
    """Whether all ranks of a plan of one step take about as long."""
    return _attained(plan) <= 1 + (settings.tolerance or 0.0) + _FOLLOWED


def what_keeps_loads(plan: ShufflePlan, settings: ShufflerSettings) -> str | None:
    """Returns the setting that keeps loads from following speeds, and what to do about it.

    Args:
        plan: of one step, among ranks that exchange samples, with speeds.
        settings: that it was made by.

    Returns:
        None if no other setting would do better, or it is not known which.
    """
    if settings.equal_rows and _gains(plan, False) and not _gains(plan, True):
        return "equal_rows=True gives every rank as many samples: set equal_rows=False"
    if not _gains(plan, settings.equal_rows):
        return None
    if settings.window == 1 and settings.partitioner not in ("rebalance", "refined"):
        return f'partitioner={settings.partitioner!r} does not follow speeds: choose "rebalance"'
    idle = int(np.argmin(plan.loads[:, 0] / plan.speeds))
    if settings.max_rows is not None and plan.num_placed[idle] == settings.max_rows:
        return f"max_rows={settings.max_rows} leaves a fast rank no room: raise it"
    tokens = int(plan.tokens[plan.computed_by(idle)].sum())
    if settings.max_tokens is not None and tokens > _FULL * settings.max_tokens:
        return f"max_tokens={settings.max_tokens} leaves a fast rank no room: raise it"
    return None


def _attained(plan: ShufflePlan) -> float:
    return relative_to_mean(plan.loads[:, 0], plan.speeds)


def _gains(plan: ShufflePlan, equal_size: bool) -> bool:
    """Whether the slowest rank takes clearly less time without limits of rows and tokens."""
    found = refined(plan.workloads, plan.num_ranks, equal_size, speeds=plan.speeds)
    return imbalance(plan.workloads, found, plan.speeds) * (1 + _FOLLOWED) < _attained(plan)
