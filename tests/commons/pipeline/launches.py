"""The collectives that ranks launch on the device in training and evaluation."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from commons.distributed import BatchShuffler
from tests.commons.histories import TokenShuffler
from tests.commons.pipeline.ranking_pipelines import (
    loaded_histories,
    pipeline_of,
    sharded_ranking_model,
    steps_of,
)

LOADED = (7, 2, 0)  # batches of each rank


class Launches(TorchDispatchMode):
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


def launches(
    name: str,
    settings: dict[str, Any],
    make_model: Callable[[], tuple[Any, Any]] = sharded_ranking_model,
    after_step: Callable[[BatchShuffler, Any], None] | None = None,
) -> list[str]:
    """Trains on loaders of different lengths, with an evaluation after two steps; returns the launches."""
    model, optimizer = make_model()
    # Each has features of its own.
    shuffler, of_evaluation = (TokenShuffler(**copy.deepcopy(settings)) for _ in range(2))
    training = pipeline_of(name, model, optimizer, shuffler)
    evaluation = pipeline_of(name, model, optimizer, of_evaluation)
    drawn = loaded_histories(LOADED[dist.get_rank()], rows=3)
    batches = iter(drawn)
    with Launches() as recorded:
        for step in range(max(LOADED)):
            training.progress(batches)
            if after_step:
                after_step(shuffler, training)
            if step == 1:
                model.eval()
                with torch.no_grad():
                    list(steps_of(evaluation, drawn[:3]))
                model.train()
        training.reset()
    return recorded.names


def check_launches(results: list[list[str]], num_groups: int) -> None:
    """Checks that all ranks launch the same collectives in the same order, over so many groups."""
    first, *others = results
    assert others == [first] * len(others)
    assert len({launch.split(" on ")[1] for launch in first}) == num_groups
