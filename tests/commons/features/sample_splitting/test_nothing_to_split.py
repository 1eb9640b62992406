"""Where no sample is cut, a step costs no collective, operation or allocation more than without `split`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.histories import TokenShuffler, draw_histories
from tests.commons.pipeline.ranking_pipelines import sharded_ranking_model

STEPS = 4


class _Operations(TorchDispatchMode):
    """Records the operations of this thread, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _costs(split: bool) -> dict[str, Any]:
    """Returns the collectives, operations and allocations of some steps, planning included."""
    shuffler = TokenShuffler(equal_rows=False, split=split)
    model, optimizer = sharded_ranking_model()
    rng = np.random.default_rng(dist.get_rank())
    batches = iter([draw_histories(rng, 8) for _ in range(2 * STEPS + 1)])

    def step() -> None:  # not in a pipeline, whose planning thread may be anywhere when the recording ends
        batch = next(batches)
        plan = shuffler.plan(batch)
        assert plan.rows.starts_sample.all()
        loss, _ = model(shuffler.exchange(batch, plan))
        optimizer.zero_grad()
        shuffler.scale(loss, plan, "sum").backward()
        optimizer.step()

    step()
    with recorded_collectives() as collectives, _Operations() as operations:
        for _ in range(STEPS):
            step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for _ in range(STEPS):
            step()
    sizes = [
        event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    return {
        "collectives": [name for name, _ in collectives],
        "operations": operations.names,
        "allocations": len([size for size in sizes if size > 0]),
        "bytes": sum(size for size in sizes if size > 0),
    }


def _both() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return [_costs(split) for split in (False, True)]


def test_a_step_without_a_cut_costs_nothing_more(pools):
    for without, with_split in pools(2).run(_both):
        assert with_split == without
        assert len(without["operations"]) > 100 and without["allocations"] > 100
