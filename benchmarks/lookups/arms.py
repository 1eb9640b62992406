"""The arms that the benchmark of lookups compares."""

from __future__ import annotations

from functools import partial
from typing import Any

from commons.distributed import BatchShuffler, BatchShufflerFactory
from commons.perf_model import HSTUFlops
from hstu.batch_shuffler import flops_of_rows

AS_LOADED, REFERENCE = "as loaded", "refined"
# By name, the settings of a shuffler.
ARMS: dict[str, dict[str, Any]] = {
    AS_LOADED: {},
    "karmarkar_karp": {"partitioner": "karmarkar_karp"},
    REFERENCE: {"partitioner": "refined"},
    "rebalance": {"partitioner": "rebalance"},
    "rebalance, groups": {"partitioner": "rebalance", "group_feature": "user_id"},
}


def shuffler_of(arm: str, flops: HSTUFlops) -> BatchShuffler:
    """Makes the shuffler of an arm; collective over all ranks."""
    if arm == AS_LOADED:
        return BatchShufflerFactory.create(
            "identity", get_workloads=partial(flops_of_rows, flops), unit="FLOPs"
        )
    return BatchShufflerFactory.create("hstu", flops=flops, **ARMS[arm])
