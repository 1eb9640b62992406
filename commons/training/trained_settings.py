"""Settings that a training was started with, written into its checkpoints and compared on resuming."""

from __future__ import annotations

import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

SAMPLES = "samples of an epoch"
# Settings that a resumed training may change. It goes on with the new value, and says so.
_MAY_CHANGE = {
    SAMPLES,
    "NetworkArgs.dtype_str",
    "NetworkArgs.hidden_dropout",
    "NetworkArgs.kernel_backend",
    "NetworkArgs.recompute_input_layernorm",
    "NetworkArgs.recompute_input_silu",
    "OptimizerArgs.adam_beta1",
    "OptimizerArgs.adam_beta2",
    "OptimizerArgs.adam_eps",
    "OptimizerArgs.learning_rate",
    "RankingArgs.eval_metrics",
    "RetrievalArgs.eval_metrics",
    "RetrievalArgs.num_negatives",
    "RetrievalArgs.temperature",
}
_PARAMETERS = "parameter "
_MOST_PARAMETERS = 3  # named in an error


def settings_of(*configurables: Any) -> dict[str, Any]:
    """Returns all fields of gin configurables, by the names that gin files have for them."""
    return {
        f"{type(args).__name__}.{field.name}": getattr(args, field.name)
        for args in configurables
        for field in fields(args)
    }


def as_saved(settings: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Returns what a checkpoint records: settings, and dtype and shape of each parameter and buffer."""
    with warnings.catch_warnings():  # torch deprecates ShardedTensor, in which TorchRec returns its tables
        warnings.simplefilter("ignore", FutureWarning)
        parameters = {
            _PARAMETERS + name: f"{str(value.dtype).removeprefix('torch.')} {list(value.size())}"
            for name, value in model.state_dict().items()
            if hasattr(value, "dtype")
        }
    return json.loads(json.dumps(settings | parameters, default=str))


def changes(checkpoint: Path, saved: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Compares two results of `as_saved`.

    Settings that only one of them has are not compared; parameters must be the same.

    Returns:
        One line for each changed setting that a resumed training may change.

    Raises:
        ValueError: another setting differs, or a parameter; names each, with both values.
    """
    absent = "absent"
    lines = {
        name: f"{name} = {asked.get(name, absent)!r}, the checkpoint has {saved.get(name, absent)!r}"
        for name in asked | saved
        if saved.get(name, absent) != asked.get(name, absent)
        and (name.startswith(_PARAMETERS) or name in asked.keys() & saved.keys())
    }
    wrong = [
        line for name, line in lines.items() if name not in _MAY_CHANGE and not name.startswith(_PARAMETERS)
    ]
    parameters = [line for name, line in lines.items() if name.startswith(_PARAMETERS)]
    if len(parameters) > _MOST_PARAMETERS:
        parameters[_MOST_PARAMETERS:] = [f"and {len(parameters) - _MOST_PARAMETERS} more parameters"]
    if wrong or parameters:
        raise ValueError(
            f"{checkpoint} is of another training: {'; '.join(wrong + parameters)}. Resume with the "
            "checkpoint's settings, or choose another folder of checkpoints"
        )
    return list(lines.values())
