"""Batch shufflers by name, and the one that is always there, which moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..registry import NamedFactory
from .balance_report import WORKLOAD_UNITS
from .batch_shuffler import BatchShuffler

Shuffler = TypeVar("Shuffler", bound=type[BatchShuffler])


class BatchShufflerFactory(NamedFactory[BatchShuffler]):
    """Registers shufflers and creates them by name; "identity" is always there."""

    kind = "batch shuffler"
    base = BatchShuffler


def register_batch_shuffler(name: str) -> Callable[[Shuffler], Shuffler]:
    """Class decorator that registers a `BatchShuffler` under a name.

    Raises:
        TypeError: the class is not a `BatchShuffler`.
        ValueError: the name is taken.
    """
    return partial(BatchShufflerFactory.register, name)  # type: ignore[return-value]


@register_batch_shuffler("identity")
class IdentityShuffler(BatchShuffler):
    """Leaves every sample where it was loaded.

    By itself it communicates nothing. In a pipeline all ranks gather their samples' numbers, as with any
    shuffler: for the loss tokens of all ranks, and for reports.

    Args:
        process_group, settings: as `BatchShuffler` takes them, so that it can stand in for any other.
        get_workloads: the cost of each row, as `BatchShuffler.get_workloads`, for the reported imbalance; by
            default the row's tokens.
        unit: of these, as `BatchShuffler.unit`.
        get_tokens, get_loss_tokens: tokens and loss tokens of each row, as `BatchShuffler` has them.
        shared_fields: as `BatchShuffler.shared_fields`; None for those of the class.
    """

    moves_samples = False

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        get_workloads: Callable[[Any], torch.Tensor] | None = None,
        unit: str = WORKLOAD_UNITS,
        get_tokens: Callable[[Any], torch.Tensor] | None = None,
        get_loss_tokens: Callable[[Any], torch.Tensor] | None = None,
        shared_fields: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        if shared_fields is not None:
            self.shared_fields = shared_fields
        super().__init__(process_group, **settings)
        self._get_workloads = get_workloads
        self.unit = "tokens" if get_workloads is None else unit
        self._get_tokens, self._get_loss_tokens = get_tokens, get_loss_tokens

    def get_workloads(self, batch: Any) -> torch.Tensor:
        """Returns the given function's costs, or the tokens of each row."""
        return self.get_tokens(batch) if self._get_workloads is None else self._get_workloads(batch)

    def get_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the given function's tokens, or those that `BatchShuffler` counts."""
        given = self._get_tokens
        return super().get_tokens(batch) if given is None else given(batch)

    def get_loss_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the given function's loss tokens, or those that `BatchShuffler` counts."""
        given = self._get_loss_tokens
        return super().get_loss_tokens(batch) if given is None else given(batch)
