"""Rows that a rank without samples runs, since TorchRec needs one on every rank.

| batches            | training                             | evaluation                                   |
|--------------------|--------------------------------------|----------------------------------------------|
| know their padding | one padding row                      | one padding row                              |
| do not             | a copy of a real row, without a loss | `COPIES` copies, of which none is handed out |

The padding row, or the real one, is the same on all ranks: they agree on it with the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..sequence_batch.leaf_fields import Leaf
from ..sequence_batch.row_lists import is_plain_throughout
from ..sequence_batch.rows import Rows
from ..sequence_batch.tree import rebuild, take_apart

# Optimizers of FBGEMM's tables that move a row by its momentum, whatever its gradient. The weight decay of
# row-wise Adagrad does so, too.
_MOVING = ("ADAM", "LAMB", "LARS_SGD", "PARTIAL_ROWWISE_ADAM", "PARTIAL_ROWWISE_LAMB")
# A number of rows that an output has for its rows alone: fewer are as many as some models have classes.
COPIES = 61


def check_runs_copies(
    num_placed: np.ndarray,
    pads: bool,
    reduction: str | None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
) -> None:
    """Checks that training on a copied row leaves the gradient, and the tables, as they are.

    Args:
        num_placed: int64 `[ranks]`, samples of each rank.
        pads: whether batches know their padding.
        reduction: how the model reduces its losses.
        model, optimizer: those of a pipeline; None where they are unknown.

    Raises:
        ValueError: a rank has no samples, and it does not.
    """
    if pads or num_placed.all():
        return
    if reduction == "global_mean":
        raise ValueError(
            "a rank has no sample in this step and runs a copy of one, which a model that returns "
            '"global_mean" counts: return the mean over this rank\'s loss tokens, and use "mean"'
        )
    moving = "SparseAdam" if _has_sparse_adam(optimizer) else _fused_optimizer(model)
    if moving:
        raise ValueError(
            f"a rank has no sample in this step and runs a copy of one, whose rows {moving} moves for a "
            "gradient of zero: use a BaseBatch, whose padding rows look nothing up, end all loaders in "
            "the same step, or train these tables with another optimizer, such as Adagrad"
        )


def _has_sparse_adam(optimizer: Any) -> bool:
    """Returns whether an optimizer, or what containers and wrappers of optimizers hold, is a SparseAdam."""
    seen: list[Any] = [None]
    waiting = [optimizer]
    while waiting:
        one = waiting.pop()
        if any(one is other for other in seen):
            continue
        if isinstance(one, torch.optim.SparseAdam):
            return True
        seen.append(one)
        held = getattr(one, "optimizers", ())  # TorchRec's are pairs of a name and an optimizer
        held = held.values() if isinstance(held, Mapping) else held
        if isinstance(held, Iterable):
            waiting += [of[-1] if isinstance(of, tuple) and of else of for of in held]
        attributes = getattr(one, "__dict__", {})
        waiting += [attributes.get(name) for name in ("_optimizer", "optim", "optimizer")]
    return False


def _fused_optimizer(model: torch.nn.Module | None) -> str:
    """Returns the optimizer in a model's tables that moves rows without a gradient, or none."""
    modules = [] if model is None else list(model.modules())
    for module in modules:
        # TorchRec keeps lookups in lists: they are no submodules.
        listed = getattr(module, "_lookups", None)
        lookups = (
            [each for each in listed if isinstance(each, torch.nn.Module)] if isinstance(listed, list) else []
        )
        for tables in (module, *(inner for lookup in lookups for inner in lookup.modules())):
            name = getattr(getattr(tables, "optimizer", None), "name", None)
            if name in _MOVING:
                return f"the tables' {name}"
            mode = getattr(getattr(tables, "weight_decay_mode", None), "name", "NONE")
            decay = getattr(getattr(tables, "optimizer_args", None), "weight_decay", 0.0)
            if name == "EXACT_ROWWISE_ADAGRAD" and mode != "NONE" and decay:
                return "the tables' weight decay"
    return ""


def without_copies(output: Any) -> Any:
    """Returns a model's output for `COPIES` copies of a row, without the rows of tensors, arrays and lists.

    What has another number of rows, such as a statistic of one, stays.
    """
    new: dict[str, Any] = {}
    tree = take_apart(output)
    for part in tree.each():
        if isinstance(part.value, list) and len(part.value) == COPIES and is_plain_throughout(part):
            new[part.path] = []
        elif isinstance(part.value, np.ndarray) and part.value.ndim and len(part.value) == COPIES:
            new[part.path] = part.value[:0]
        elif isinstance(part.value, Leaf):
            rows = Rows(part.value)
            try:
                (field,), count = rows.fields.values(), rows.num_rows
                if count == COPIES and isinstance(field, torch.Tensor):
                    new[part.path] = field[:0]
                elif count == COPIES:
                    new[part.path] = rows.select([rows.packed()], np.zeros(0, dtype=np.int64), 0)
            except (TypeError, ValueError):  # no rows to speak of, as in a number or a sparse tensor
                continue
    try:
        return rebuild(tree, new)
    except TypeError:  # of a type that cannot be made again
        return output
