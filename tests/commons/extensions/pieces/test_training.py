"""A step without pieces costs nothing more."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from commons.extensions.pieces import Pieces
from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.histories import TokenShuffler, draw_histories
from tests.commons.pipeline.ranking_pipelines import sharded_ranking_model
from tests.on_ranks import on_ranks

STEPS = 4


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _costs(split: bool) -> dict[str, Any]:
    """Returns the collectives, operations and allocations of some steps, planning included."""
    shuffler = TokenShuffler(equal_rows=False, extensions=[Pieces()] if split else [])
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


@on_ranks(2)
def test_a_step_without_a_cut_costs_nothing_more():
    torch.manual_seed(0)
    without, with_split = [_costs(split) for split in (False, True)]
    assert with_split == without
    assert len(without["operations"]) > 100 and without["allocations"] > 100
