"""Batch shufflers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..registry import NamedFactory
from .batch_shuffler import BatchShuffler
from .identity_shuffler import IdentityShuffler

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

    def register(shuffler: Shuffler) -> Shuffler:
        BatchShufflerFactory.register(name, shuffler)
        return shuffler

    return register


BatchShufflerFactory.register("identity", IdentityShuffler)
