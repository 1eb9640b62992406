"""Extensions: optional parts of a shuffler, each in a folder of its own, and where they hook into a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    import torch

    from ..sequence_batch.packed_rows import PackedRows
    from ..sequence_batch.row_schema import FieldValue
    from ..sequence_batch.rows import Rows
    from .batch_format import Format
    from .row_table import RowTable
    from .shuffle_plan import ShufflePlan
    from .shuffler_settings import ShufflerSettings
    from .step import Step

Place = Callable[["RowTable"], "ShufflePlan"]
Fields = dict[str, "FieldValue"]
# The loss to call backward on, the loss sum of this rank, and the model's output.
Forward = Callable[["Step"], "tuple[torch.Tensor, torch.Tensor, Any]"]


class Extension:
    """An optional part of a shuffler; each method is a place where it can hook into a step.

    A shuffler takes extensions in any order; `order` decides which wraps which. The core imports none of
    them, and none imports another.

    Attributes:
        name: of the extension, for messages and `excludes`.
        order: an extension wraps those of a larger order.
        reads: name of a method that a shuffler may have for it alone.
        excludes: names of extensions that it does not work with, and why.
        moves: whether it needs samples that move between ranks, and so a shuffler that is enabled.
        runs_in_parts: whether it runs forward and backward several times per step.
        partitioner_arguments: what partitioners get that take it, by name.
        waits_on_device: why the device waits for other ranks between forward and backward; empty if it does
            not.
        verifies: whether it has the ranks compare what they do; others then compare more, too.
        is_taken: whether it is part of a shuffler.
        faster_without: what to set where planning is too slow; empty if the extension hardly slows it.
    """

    name: ClassVar[str]
    order: ClassVar[int]
    reads: ClassVar[str] = ""
    excludes: ClassVar[Mapping[str, str]] = {}
    moves: ClassVar[bool] = False
    runs_in_parts: ClassVar[bool] = False
    partitioner_arguments: Mapping[str, Any] = {}
    waits_on_device: str = ""
    verifies: bool = False
    is_taken: bool = False
    faster_without: str = ""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name}; what it does, it does as part of a shuffler: "
            f"MyShuffler(extensions=[{type(self).__name__}(…)])"
        )

    def settings(self) -> Mapping[str, Any]:
        """Returns the settings by name, which all ranks must have alike."""
        return {}

    def check(self, settings: ShufflerSettings) -> None:
        """Raises a `SettingError` if it does not work with the core's settings; before all else."""

    def uses(self, device: torch.device) -> Sequence[str]:
        """Returns names of process groups that it needs on the job's device; see `RankGroup.group_for`."""
        return ()

    def setup(self, shuffler: Any) -> None:
        """Prepares for the plans of a `BatchShuffler`; called again for those of a pipeline. Collective."""

    def warm_up(self) -> None:
        """Compiles what plans need, so that no step waits for it."""

    def agree(self, batch: Any, row_format: Format) -> Any:
        """Returns plain data about the first batch that must be equal on all ranks; see `Format`."""

    def columns(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Returns int64 `[batch_size]` by name, for the planning gather; in the planning thread."""
        return {}

    @property
    def num_posted(self) -> int:
        """How many numbers `post` returns; the same on all ranks."""
        return 0

    def post(self) -> np.ndarray:
        """Returns int64 `[num_posted]` for the other ranks, which the planning gather carries; in the
        planning thread. `place` gets them as `rows.posts[name]`."""
        return np.zeros(0, dtype=np.int64)

    def take(self, posted: np.ndarray) -> None:
        """Takes what all ranks posted with a plan, int64 `[ranks, num_posted]`, as its step is handed out: in
        the same call on all ranks, in the thread that trains."""

    def place(self, rows: RowTable, place: Place) -> ShufflePlan:
        """Places rows, by calling `place` once, several times, or not at all; in the planning thread."""
        return place(rows)

    def before_copy(self, rows: Rows, plan: ShufflePlan) -> Rows:
        """Returns the rows to copy to the device and exchange, from those that were planned.

        In a loop of one's own, `exchange` calls it for a batch that it, or `plan_ahead`, may have been called
        for. It returns such rows as they are.
        """
        return rows

    def around_exchange(
        self, rows: PackedRows, plan: ShufflePlan, exchange: Callable[[PackedRows, ShufflePlan], Fields]
    ) -> Fields:
        """Exchanges the rows of a batch for other fields, by calling `exchange`."""
        return exchange(rows, plan)

    def after_exchange(self, batch: Any, plan: ShufflePlan) -> Any:
        """Returns the batch for the model, from the exchanged one."""
        return batch

    def join(self, model: torch.nn.Module, device: torch.device, loss_reduction: str) -> None:
        """Prepares for a pipeline of the model, which takes a batch and returns `(losses, output)`."""

    def forward(self, step: Step, forward: Forward) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Runs the model of `join` in a pipeline, by calling `forward` or in another way."""
        return forward(step)

    def check_ran(self, plan: ShufflePlan) -> None:
        """Checks that the model has run on the batch of a plan as this extension needs it."""

    def report(self, plan: ShufflePlan) -> Mapping[str, Any]:
        """Returns figures of a step for its report, by name; integers also stand in the log line."""
        return {}


def order_extensions(
    extensions: Sequence[Extension], taken: Sequence[Extension] = ()
) -> tuple[Extension, ...]:
    """Returns the extensions, and those that their shuffler has `taken` before, outermost first.

    Raises:
        TypeError: one is no `Extension`, or they are no list.
        ValueError: one is given twice, is part of another shuffler, or excludes another.
    """
    if not isinstance(extensions, Sequence):
        raise TypeError(f"extensions is {extensions!r}; expected a list of objects such as Pieces()")
    for extension in extensions:
        if not isinstance(extension, Extension):
            raise TypeError(f"extensions has {extension!r}; expected objects such as Pieces()")
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


def chain(extensions: Sequence[Extension], hook: str, innermost: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function in a method of each extension that has one of its own, the first outermost."""
    wrapped = innermost
    for extension in reversed(extensions):
        if getattr(type(extension), hook) is not getattr(Extension, hook):
            wrapped = _wrap(getattr(extension, hook), wrapped)
    return wrapped


def _wrap(method: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: method(*arguments, inner)
