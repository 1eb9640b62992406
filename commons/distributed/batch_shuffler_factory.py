"""The factory of batch shufflers, and the identity shuffler, which moves no sample."""

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
    """Registers shufflers and creates them by name. "identity" is built in."""

    kind = "batch shuffler"
    base = BatchShuffler


def register_batch_shuffler(name: str) -> Callable[[Shuffler], Shuffler]:
    """Returns a class decorator that registers a `BatchShuffler` under a name.

    Raises:
        TypeError: the class is not a `BatchShuffler`.
        ValueError: the name is already registered.
    """
    return partial(BatchShufflerFactory.register, name)  # type: ignore[return-value]


@register_batch_shuffler("identity")
class IdentityShuffler(BatchShuffler):
    """Leaves every sample where it was loaded.

    Outside a pipeline, `plan` and `exchange` communicate nothing. In a pipeline, all ranks gather the counts
    of their samples, as with any shuffler, because the loss and the reports need these counts.

    Args:
        process_group, settings: arguments of `BatchShuffler`, so that this class can stand in for any other.
        get_workloads: substitute for `BatchShuffler.get_workloads`, for the reported imbalance. Defaults to
            the tokens of each row.
        unit: unit of the workloads that `get_workloads` returns.
        get_tokens, get_loss_tokens: substitutes for the methods of these names. None means the methods.
        shared_fields: paths as in `BatchShuffler.shared_fields`. None means those of the class.
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
        """Returns the costs that the given function computes, or else the tokens of each row."""
        return (self._get_workloads or self.get_tokens)(batch)

    def get_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the tokens that the given function counts, or else those that `BatchShuffler` counts."""
        return (self._get_tokens or super().get_tokens)(batch)

    def get_loss_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the loss tokens that the given function counts, or else those of `BatchShuffler`."""
        return (self._get_loss_tokens or super().get_loss_tokens)(batch)
