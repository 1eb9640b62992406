"""One step on its way, from the loader to the model; and the rows that a rank without samples runs in it.

TorchRec needs a row on every rank:

| batches            | training                             | evaluation                                  |
|--------------------|--------------------------------------|---------------------------------------------|
| know their padding | one padding row                      | one padding row                             |
| do not             | a copy of a real row, without a loss | `COPIES` copies, of which none is handed out |

The padding row, or the real one, is the same on all ranks: they agree on it with the format.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch

from ..sequence_batch.container_types import type_name
from ..sequence_batch.leaf_fields import like
from ..sequence_batch.optional_types import Pipelineable
from ..sequence_batch.row_lists import is_plain_throughout
from ..sequence_batch.rows import Rows
from ..sequence_batch.tree import Leaf, rebuild, take_apart, tensors_and_arrays
from .shuffle_plan import ShufflePlan

# Steps on their way at most, from the one that is planned to the one that trains: a pipeline plans up to six
# before it runs the first of them.
MOST_ON_THEIR_WAY = 8
# Optimizers of FBGEMM's tables that move a row by its momentum, whatever its gradient.
_MOVING = ("ADAM", "LAMB", "LARS_SGD", "PARTIAL_ROWWISE_ADAM", "PARTIAL_ROWWISE_LAMB")
# A number of rows that an output has for its rows alone: fewer are as many as some models have classes.
COPIES = 61


@dataclass(eq=False)
class Step(Pipelineable):
    """A batch of any type with its plan, which TorchRec's pipelines pass on as they do a batch.

    All other attributes and items are those of `batch`.

    Attributes:
        rows: this rank's, as prepared on the host, as copied to the device, and then as exchanged.
        plan: among the ranks that exchange with this one.
        mode: as `PlanAhead.next_step` took it, when the batch was loaded.
        wait_seconds: that this rank waited for the plan.
        exchange_seconds: host time of the exchange.
        failures: get errors that all ranks have to raise with the next plan.
    """

    rows: Rows
    plan: ShufflePlan
    mode: Any = None
    wait_seconds: float = 0.0
    exchange_seconds: float = 0.0
    failures: list[Exception] = field(default_factory=list)

    @property
    def batch(self) -> Any:
        """As loaded; once the rows are exchanged, what they were put together to, for the model."""
        return self.rows.batch

    @property
    def scale_to_mean(self) -> float:
        """Factor of a rank's loss sum, for the gradient of the mean over all loss tokens; 0 without any."""
        whole = self.plan.whole
        return whole.num_ranks / whole.num_loss_tokens if whole.num_loss_tokens else 0.0

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Returns the step with its rows on `device`."""
        return replace(self, rows=self.rows.to(device, non_blocking))

    def pin_memory(self) -> Self:
        """Returns the step with its rows in pinned host memory."""
        return replace(self, rows=self.rows.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that `stream` uses the rows."""
        self.rows.record_stream(stream)

    def let_go(self) -> None:
        """Forgets the batch, which has run, and its memory."""
        self.rows = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name in ("batch", "rows"):  # not there yet, as in copy.copy
            raise AttributeError(name)
        return getattr(self.batch, name)

    def __getitem__(self, key: Any) -> Any:
        return self.batch[key]


def check_not_hidden(batch: Any) -> None:
    """Raises a TypeError if TorchRec would find an attribute of a step in place of the batch's own."""
    names = Step.__dataclass_fields__.keys() | {name for name in dir(Step) if not name.startswith("_")}
    for name in sorted(names):
        if tensors_and_arrays(take_apart(getattr(batch, name, None))):
            raise TypeError(
                f"a {type_name(batch)} has tensors in {name!r}, in place of which TorchRec would see what "
                "its step has of this name: rename it"
            )


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
    """Returns whether an optimizer, or what TorchRec's optimizers hold, is a SparseAdam."""
    inner = [getattr(optimizer, "_optimizer", None), *(of for _, of in getattr(optimizer, "optimizers", ()))]
    return isinstance(optimizer, torch.optim.SparseAdam) or any(
        _has_sparse_adam(of) for of in inner if of is not None
    )


def _fused_optimizer(model: torch.nn.Module | None) -> str:
    """Returns the name of an optimizer in a model's tables that moves rows without a gradient, or none."""
    for module in model.modules() if model is not None else ():
        name = getattr(getattr(module, "optimizer", None), "name", None)
        if name in _MOVING:
            return f"the tables' {name}"
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
            except (TypeError, ValueError):  # no rows to speak of, as in a number or a sparse tensor
                continue
            if count == COPIES and isinstance(field, torch.Tensor):
                new[part.path] = like(field[:0], part.value)
            elif count == COPIES:
                new[part.path] = rows.select([rows.packed()], np.zeros(0, dtype=np.int64), 0)
    try:
        return rebuild(tree, new)
    except TypeError:  # of a type that cannot be made again
        return output
