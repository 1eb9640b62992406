"""Adapter to the placement that training calls; goes away once `place` is there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from commons.distributed import placement


@dataclass(frozen=True)
class ShufflerSettings:
    """As commons.distributed.shuffler_settings has it."""

    partitioner: str = "refined"
    tolerance: float | None = None
    equal_rows: bool = True
    max_rows: int | None = None
    max_tokens: int | None = None
    window: int = 1
    window_max_step_ratio: float | None = None
    exchange: str = "all_to_all"
    verify: bool = False
    max_tokens_per_micro_batch: int | None = None


@dataclass(frozen=True)
class Placed:
    """int64 `[samples]` each."""

    rank: np.ndarray
    step: np.ndarray


LoadedSamples = placement.LoadedSamples


def place(
    samples: placement.LoadedSamples, settings: ShufflerSettings, ranks_per_node: int | None = None
) -> Placed:
    """Places samples of `[ranks, batches]`."""
    num_steps = samples.num_loaded.shape[1]
    loaded = replace(samples, batch_sizes=samples.batch_sizes.sum(1), num_loaded=samples.num_loaded.sum(1))
    old = placement.Placement(settings.partitioner, None, True, None, None, settings.window)
    steps = old.place_window(loaded, num_steps) if num_steps > 1 else [old.place(loaded, ranks_per_node)]
    rank, step = np.empty_like(samples.workloads), np.empty_like(samples.workloads)
    for number, parts in enumerate(steps):
        for to, part in enumerate(parts):
            rank[part], step[part] = to, number
    return Placed(rank, step)
