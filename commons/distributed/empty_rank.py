"""The row that a rank without samples runs, because TorchRec needs at least one row on every rank.

It is a padding row if batches know their padding, otherwise a copy of a real row, which has no loss. The row
is the same on all ranks, which agree on it along with the format.
"""

from __future__ import annotations

import numpy as np
import torch

# FBGEMM optimizers whose momentum changes a table row that was looked up, even if its gradient is zero.
# Row-wise Adagrad with weight decay does so, too.
_MOVING = ("ADAM", "LAMB", "LARS_SGD", "PARTIAL_ROWWISE_ADAM", "PARTIAL_ROWWISE_LAMB")


def check_runs_copies(
    num_placed: np.ndarray,
    pads: bool,
    reduction: str | None,
    model: torch.nn.Module | None = None,
) -> None:
    """Checks that running a copied row changes neither the loss nor the embedding tables.

    Args:
        num_placed: int64 `[ranks]`, number of samples on each rank.
        pads: whether batches know their padding.
        reduction: the model's reduction of its losses.
        model: model of a pipeline. None if it is unknown, or does not train.

    Raises:
        ValueError: a rank has no samples, and a copied row would count in a "global_mean" or change a table.
    """
    if pads or num_placed.all():
        return
    if reduction == "global_mean":
        raise ValueError(
            "a rank has no sample in this step and runs a copy of one, which a model that returns "
            '"global_mean" counts: return the mean over this rank\'s loss tokens, and use "mean"'
        )
    if moving := _fused_optimizer(model):
        raise ValueError(
            f"a rank has no sample in this step and runs a copy of one, whose rows {moving} changes even "
            "with a gradient of zero: use a BaseBatch, which has padding rows, end all loaders in the same "
            "step, or train these tables with another optimizer, such as Adagrad"
        )


def _fused_optimizer(model: torch.nn.Module | None) -> str:
    """Returns which optimizer in a model's tables changes rows with zero gradient. Empty if none does."""
    for module in () if model is None else model.modules():
        # TorchRec keeps lookups in plain lists, so they are not submodules.
        listed = getattr(module, "_lookups", None)
        lookups = [of for of in listed if isinstance(of, torch.nn.Module)] if isinstance(listed, list) else []
        for tables in (module, *(inner for lookup in lookups for inner in lookup.modules())):
            name = getattr(getattr(tables, "optimizer", None), "name", None)
            if name in _MOVING:
                return f"the tables' {name}"
            mode = getattr(getattr(tables, "weight_decay_mode", None), "name", "NONE")
            decay = getattr(getattr(tables, "optimizer_args", None), "weight_decay", 0.0)
            if name == "EXACT_ROWWISE_ADAGRAD" and mode != "NONE" and decay:
                return "the tables' weight decay"
    return ""
