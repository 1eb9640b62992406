"""One step on its way from the loader to the model."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torchrec.streamable import Pipelineable

from ..sequence_batch.row_schema import type_name
from ..sequence_batch.rows import Rows
from ..sequence_batch.tree import take_apart
from .shuffle_plan import ShufflePlan

# Most steps from the one being planned to the one in training. A pipeline plans up to six before the first.
MOST_ON_THEIR_WAY = 8


@dataclass(eq=False)
class Step(Pipelineable):
    """A batch of any type with its plan, which TorchRec's pipelines pass along like a plain batch.

    All other attributes and items are those of `batch`.

    Attributes:
        rows: this rank's rows, first prepared on the host, then copied to the device, and then exchanged.
        plan: plan of the ranks that exchange with this one.
        load_seconds: time that this rank waited for its loader, for the batch of a later step.
        wait_seconds: time that this rank waited for the plan.
        exchange_seconds: host time of the exchange.
        failures: errors in this step that all ranks have to raise with the next plan.
    """

    rows: Rows
    plan: ShufflePlan
    load_seconds: float = 0.0
    wait_seconds: float = 0.0
    exchange_seconds: float = 0.0
    failures: list[Exception] = field(default_factory=list)

    @property
    def batch(self) -> Any:
        """The batch as loaded. After the exchange, the batch for the model."""
        return self.rows.batch

    @property
    def scale_to_mean(self) -> float:
        """Factor for a rank's loss sum: ranks ÷ loss tokens of all ranks. 0 without loss tokens."""
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
        """Releases the memory of the batch, which has run."""
        self.rows = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name == "rows":  # not set yet, as in copy.copy
            raise AttributeError(name)
        batch = self.rows.batch  # raises the error that made the property `batch` fail
        return batch if name == "batch" else getattr(batch, name)

    def __getitem__(self, key: Any) -> Any:
        return self.batch[key]


def check_not_hidden(batch: Any) -> None:
    """Raises a TypeError if a step's attribute would hide tensors of the batch from TorchRec."""
    names = Step.__dataclass_fields__.keys() | {name for name in dir(Step) if not name.startswith("_")}
    for name in sorted(names):
        hidden = None
        with suppress(KeyError):  # raised by dicts whose __getattr__ looks up items
            hidden = getattr(batch, name, None)
        if take_apart(hidden).tensors_and_arrays():
            raise TypeError(
                f"a {type_name(batch)} has tensors in {name!r}, which TorchRec would not see, because its "
                "step has an attribute of the same name: rename the field"
            )


def view_of(batch: Any, shared_fields: Collection[str]) -> Rows:
    """Returns the rows of a loaded batch of any supported type, to count or to move them.

    Raises:
        TypeError: `batch` is a step, which a pipeline has planned before.
    """
    if isinstance(batch, Step):
        raise TypeError(
            "a batch is a step that was planned before: a _next_batch must not repeat one of the pipeline's "
            "batches for a rank that ran dry. Return None there: ranks may have fewer batches"
        )
    return Rows(batch, shared_fields)
