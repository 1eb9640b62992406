"""All ranks launch the collectives of training and evaluation in one order, group by group and over all."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.commons.features.sample_splitting.drawn_cuts import drawn_cuts
from tests.commons.pipeline.ranking_pipelines import (
    TokenShuffler,
    draw_histories,
    pipeline_of,
    sharded_ranking_model,
)

ROWS = 3
LOADED = (7, 2, 0)  # batches of each rank


class _Launches(TorchDispatchMode):
    """Records the collectives that this thread launches on the device, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func.__name__ not in ("send.default", "recv_.default"):  # on the host
            (group,) = (
                a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
            )
            self.names.append(f"{func.__name__} on {dist.ProcessGroup.unbox(group).group_name}")
        return func(*args, **(kwargs or {}))


def _launches(name: str, settings: dict[str, Any]) -> list[str]:
    """Trains on loaders of different lengths, with an evaluation after two steps, and unshuffles."""
    model, optimizer = sharded_ranking_model()
    shuffler, of_evaluation = TokenShuffler(**settings), TokenShuffler(**settings)
    if "split" in settings:
        shuffler.planner.cuts = of_evaluation.planner.cuts = partial(drawn_cuts, seed=0)
    training = pipeline_of(name, model, optimizer, shuffler)
    evaluation = pipeline_of(name, model, optimizer, of_evaluation)
    rng = np.random.default_rng(dist.get_rank())
    drawn = [draw_histories(rng, ROWS) for _ in range(LOADED[dist.get_rank()])]
    batches = iter(drawn)
    with _Launches() as launches:
        for step in range(max(LOADED)):
            training.progress(batches)
            shuffler.unshuffle(torch.arange(training.num_samples), training.plan)
            if step == 1:
                model.eval()
                held_out = iter(drawn[:3])
                while True:
                    try:
                        with torch.no_grad():
                            evaluation.progress(held_out)
                    except StopIteration:
                        break
                model.train()
        training.reset()
    return launches.names


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"equal_rows": False},
        {"max_tokens_per_micro_batch": 16, "verify": True},
        {"split": True, "equal_rows": False},
    ],
)
@pytest.mark.parametrize("name", ["none", "native"])
def test_all_ranks_launch_the_same_collectives_in_the_same_order(pools, name, settings):
    first, *others = pools(3).run(_launches, name, settings)
    assert others == [first] * 2
    # The job's, the exchange's, and that of pieces.
    assert len({launch.split(" on ")[1] for launch in first}) == 2 + ("split" in settings)
