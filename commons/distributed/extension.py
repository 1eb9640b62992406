"""Extensions: optional parts of a shuffler, each in its own folder, and their hooks into a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    import torch

    from ..sequence_batch.fields import FieldValue
    from ..sequence_batch.packed_rows import PackedRows
    from ..sequence_batch.rows import Rows
    from .exchange import Step
    from .plan import Format, RowTable, ShufflePlan
    from .settings import ShufflerSettings

Place = Callable[["RowTable"], "ShufflePlan"]
Fields = dict[str, "FieldValue"]
# Returns the loss to call backward on, this rank's loss sum, and the model's output.
Forward = Callable[["Step"], "tuple[torch.Tensor, torch.Tensor, Any]"]


class Extension:
    """An optional part of a shuffler, which takes extensions in any order. Each method is a hook into a step.

    The core imports no extension, and no extension with hooks imports another.
    Provisional: may change in a minor version.

    Attributes:
        name: name of the extension, for messages and for `excludes`.
        order: nesting order. An extension wraps all extensions of a larger order.
        excludes: names of extensions that this one does not work with, each with the reason.
        moves: whether it needs samples to move between ranks, and therefore an enabled shuffler.
        runs_in_parts: whether it runs forward and backward several times per step.
        times_steps: whether it times a step from forward to backward.
        partitioner_arguments: arguments by name, for partitioners that accept them.
        computes_alone: whether it needs ranks that compute just the samples that were placed there.
        waits_on_device: reason why the device waits for other ranks in forward or backward. Empty if not.
        verifies: whether it compares plans and data between ranks. Other extensions then compare more, too.
        is_taken: whether it is already part of a shuffler.
    """

    name: ClassVar[str]
    order: ClassVar[int]
    excludes: Mapping[str, str] = {}
    moves: ClassVar[bool] = False
    runs_in_parts: ClassVar[bool] = False
    computes_alone: ClassVar[bool] = False
    times_steps: ClassVar[bool] = False
    partitioner_arguments: Mapping[str, Any] = {}
    waits_on_device: str = ""
    verifies: bool = False
    is_taken: bool = False

    def settings(self) -> Mapping[str, Any]:
        """Returns the extension's settings by name. They must be equal on all ranks."""
        return {}

    def check(self, settings: ShufflerSettings) -> None:
        """Raises a `SettingError` if the extension rejects the core's settings. Called before other hooks."""

    def uses(self, device: torch.device) -> Sequence[str]:
        """Returns the names of this extension's process groups on `device`, for `RankGroup.group_for`."""
        return ()

    def setup(self, shuffler: Any) -> None:
        """Prepares for plans of a `BatchShuffler`. Called again for each new planner. Collective."""

    def warm_up(self) -> None:
        """Compiles the functions that planning calls, so that no step waits for the compiler."""

    def agree(self, batch: Any, row_format: Format) -> Any:
        """Returns plain data about the first batch that must be equal on all ranks. See `Format`."""

    def columns(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Returns int64 columns `[batch_size]` by name, for the gather. Runs in the planning thread."""
        return {}

    @property
    def num_posted(self) -> int:
        """Number of integers that `post` returns. It must be the same on all ranks."""
        return 0

    def post(self) -> np.ndarray:
        """Returns int64 `[num_posted]`, which the planning gather carries to all ranks. `place` finds the
        arrays of all ranks in `rows.posts[name]`. Runs in the planning thread."""
        return np.zeros(0, dtype=np.int64)

    def take(self, posted: np.ndarray) -> None:
        """Receives the posts of all ranks for a plan, int64 `[ranks, num_posted]`, when its step is handed
        out. Runs in the training thread, in the same call on all ranks."""

    def place(self, rows: RowTable, place: Place) -> ShufflePlan:
        """Places rows by calling `place` once, repeatedly, or not at all. Runs in the planning thread."""
        return place(rows)

    def before_copy(self, rows: Rows, plan: ShufflePlan) -> Rows:
        """Returns the rows to copy to the device and exchange, made from the planned rows.

        Rows that are already prepared must come back unchanged. Outside a pipeline, `exchange` calls this
        hook even if `plan_ahead`, or an earlier `exchange`, has called it for the same batch.
        """
        return rows

    def around_exchange(
        self, rows: PackedRows, plan: ShufflePlan, exchange: Callable[[PackedRows, ShufflePlan], Fields]
    ) -> Fields:
        """Calls `exchange` on the rows of a batch, and returns the fields of this rank's new rows."""
        return exchange(rows, plan)

    def after_exchange(self, batch: Any, plan: ShufflePlan) -> Any:
        """Returns the batch for the model, made from the exchanged batch."""
        return batch

    def join(self, model: torch.nn.Module, device: torch.device, loss_reduction: str) -> None:
        """Prepares for a pipeline of `model`. The model takes a batch and returns `(losses, output)`."""

    def forward(self, step: Step, forward: Forward) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Runs the model given to `join` on a step, by calling `forward` or in another way."""
        return forward(step)

    def check_ran(self, plan: ShufflePlan) -> None:
        """Checks that the model ran on the batch of a plan in the way that this extension requires."""

    def report(self, plan: ShufflePlan) -> Mapping[str, Any]:
        """Returns figures of a step for its report, by name. The log line shows the nonzero integers."""
        return {}


def order_extensions(
    extensions: Sequence[Extension], taken: Sequence[Extension] = ()
) -> tuple[Extension, ...]:
    """Returns the new extensions and those that the shuffler has already `taken`, outermost first.

    Raises:
        ValueError: an extension is given twice, is part of another shuffler, or excludes another.
    """
    ordered = tuple(sorted([*taken, *extensions], key=lambda extension: (extension.order, extension.name)))
    names = [extension.name for extension in ordered]
    for extension in ordered:
        if extension.is_taken and extension not in taken:
            raise ValueError(f"{extension.name} is part of another shuffler; make an object for each")
        if names.count(extension.name) > 1:
            raise ValueError(f"extensions has {extension.name} twice; expected one of each")
        for other in names:
            if other in extension.excludes:
                raise ValueError(f"{extension.name} excludes {other}: {extension.excludes[other]}")
    return ordered


def chain(extensions: Sequence[Extension], hook: str, wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function in the hook of each extension that overrides it. The first one is outermost."""
    for extension in reversed(extensions):
        if getattr(type(extension), hook) is not getattr(Extension, hook):
            wrapped = _wrap(getattr(extension, hook), wrapped)
    return wrapped


def _wrap(method: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: method(*arguments, inner)
