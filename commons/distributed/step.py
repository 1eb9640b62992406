"""One step on its way, from the loader to the model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from ..sequence_batch.container_types import type_name
from ..sequence_batch.optional_types import Pipelineable
from ..sequence_batch.rows import Rows
from ..sequence_batch.tree import take_apart, tensors_and_arrays
from .shuffle_plan import ShufflePlan

# Steps on their way at most, from the one that is planned to the one that trains: a pipeline plans up to six
# before it runs the first of them.
MOST_ON_THEIR_WAY = 8


@dataclass(eq=False)
class Step(Pipelineable):
    """A batch of any type with its plan, which TorchRec's pipelines pass on as they do a batch.

    All other attributes and items are those of `batch`.

    Attributes:
        rows: this rank's, as prepared on the host, as copied to the device, and then as exchanged.
        plan: among the ranks that exchange with this one.
        mode: as `PlanAhead.next_step` took it, when the batch was loaded.
        load_seconds: that this rank waited for its loader, for a batch of a later step.
        wait_seconds: that this rank waited for the plan.
        exchange_seconds: host time of the exchange.
        failures: get errors that all ranks have to raise with the next plan.
    """

    rows: Rows
    plan: ShufflePlan
    mode: Any = None
    load_seconds: float = 0.0
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
        if name == "rows":  # not there yet, as in copy.copy
            raise AttributeError(name)
        batch = self.rows.batch  # raises what kept the property of this name from returning
        return batch if name == "batch" else getattr(batch, name)

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
