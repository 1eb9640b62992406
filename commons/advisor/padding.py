"""Gains of balancing for a model that pads, in which a rank costs its rows × its longest row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..distributed.plan import ShufflePlan


@dataclass(frozen=True)
class PaddedModel:
    """Figures for a model that pads a rank's rows to its longest row; entries of the JSON output.

    Attributes:
        as_loaded, rebalance, padded: sum over steps of the largest cost of a rank ÷ sum of the mean costs
            without padding: as loaded, by the default, and by the extension `Padded`.
        speedup: time of all steps as loaded ÷ their time with `Padded`, at most.
    """

    as_loaded: float
    rebalance: float
    padded: float
    speedup: float


def padded_model(plans: Sequence[ShufflePlan]) -> PaddedModel:
    """Returns the figures of steps from the plans of `rebalance`. Needs the extension `padded`."""
    from ..extensions.padded.padded_plan import plan_padded
    from ..extensions.padded.runs import padded_costs

    largest = []
    for plan in plans:
        padded = plan_padded(plan.rows)
        balanced = padded_costs(plan.rows.work, plan.destination, plan.num_rows)
        largest.append([padded.loads_before.max(), balanced.max(), padded.loads.max()])
    as_loaded, rebalance, after = np.sum(largest, 0).tolist()
    mean = sum(plan.total_load / plan.num_ranks for plan in plans) or 1.0
    return PaddedModel(
        as_loaded=as_loaded / mean,
        rebalance=rebalance / mean,
        padded=after / mean,
        speedup=as_loaded / after if after else 1.0,
    )
