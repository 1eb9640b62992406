"""The models that the demo runs, each with gin files of its own beside this one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import gin
import torch

from commons.training import TrainerArgs, TrainingTask

# Modules, not functions: two models' gin configurables of one name cannot be configured in one process.
TASKS = {
    "hstu": ("hstu.training.ranking_task", "ranking_task"),
    "sid_gr": ("sid_gr.training.sid_gr_task", "sid_gr_task"),
}


def parse_config(
    model: str, long_histories: bool = False
) -> Callable[[TrainerArgs, torch.device], TrainingTask]:
    """Parses the model's gin file; returns what makes its task.

    Args:
        model: a key of `TASKS`.
        long_histories: whether to parse that of histories that no placement of whole samples balances, too.
    """
    module, function = TASKS[model]
    make_task = getattr(importlib.import_module(module), function)
    for name in [model] + [f"{model}_long"] * long_histories:
        gin.parse_config_file(str(Path(__file__).parent / f"{name}.gin"))
    return make_task
