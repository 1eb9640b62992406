"""Rows that a rank without samples runs, because TorchRec needs at least one row on every rank.

| batch knows its padding | training                             | evaluation                               |
|-------------------------|--------------------------------------|------------------------------------------|
| yes                     | one padding row                      | one padding row                          |
| no                      | a copy of a real row, without a loss | `COPIES` copies, dropped from the output |

The padding row or real row is the same on all ranks, which agree on it along with the format.
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

# FBGEMM optimizers whose momentum changes a table row that was looked up, even if its gradient is zero.
# Row-wise Adagrad with weight decay does so, too.
_MOVING = ("ADAM", "LAMB", "LARS_SGD", "PARTIAL_ROWWISE_ADAM", "PARTIAL_ROWWISE_LAMB")
# Copies to evaluate. An output of this length is taken for rows. A smaller number could be a class count.
COPIES = 61


def check_runs_copies(
    num_placed: np.ndarray,
    pads: bool,
    reduction: str | None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
) -> None:
    """Checks that running a copied row changes neither the loss nor the embedding tables.

    Args:
        num_placed: int64 `[ranks]`, number of samples on each rank.
        pads: whether batches know their padding.
        reduction: the model's reduction of its losses.
        model, optimizer: model and optimizer of a pipeline. None if they are unknown, or do not train.

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
    moving = "SparseAdam" if _has_sparse_adam(optimizer) else _fused_optimizer(model)
    if moving:
        raise ValueError(
            f"a rank has no sample in this step and runs a copy of one, whose rows {moving} changes even "
            "with a gradient of zero: use a BaseBatch, whose padding rows look nothing up, end all loaders "
            "in the same step, or train these tables with another optimizer, such as Adagrad"
        )


def _has_sparse_adam(optimizer: Any) -> bool:
    """Returns whether an optimizer, or any optimizer that it contains or wraps, is a SparseAdam."""
    seen: list[Any] = [None]
    waiting = [optimizer]
    while waiting:
        one = waiting.pop()
        if any(one is other for other in seen):
            continue
        if isinstance(one, torch.optim.SparseAdam):
            return True
        seen.append(one)
        held = getattr(one, "optimizers", ())  # TorchRec holds pairs of a name and an optimizer
        held = held.values() if isinstance(held, Mapping) else held
        if isinstance(held, Iterable):
            waiting += [of[-1] if isinstance(of, tuple) and of else of for of in held]
        attributes = getattr(one, "__dict__", {})
        waiting += [attributes.get(name) for name in ("_optimizer", "optim", "optimizer")]
    return False


def _fused_optimizer(model: torch.nn.Module | None) -> str:
    """Returns which optimizer in a model's tables changes rows with zero gradient. Empty if none does."""
    modules = [] if model is None else list(model.modules())
    for module in modules:
        # TorchRec keeps lookups in plain lists, so they are not submodules.
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
    """Returns a model's output for `COPIES` copies of a row, with no rows in tensors, arrays, and lists.

    Values with a different number of rows, such as a statistic with only one, stay unchanged.
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
            except (TypeError, ValueError):  # it has no rows, like a 0-d or sparse tensor
                continue
    try:
        return rebuild(tree, new)
    except TypeError:  # the output has a type that cannot be rebuilt
        return output
