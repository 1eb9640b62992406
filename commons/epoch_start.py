"""Iteration over one rank's part of each epoch, in the process that reads its data loader."""

from __future__ import annotations

import functools
import itertools
import logging
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from .argument_checks import require, require_at_least, require_integer

logger = logging.getLogger(__name__)


class EpochStart:
    """Base class of iterables over a rank's part of each epoch, which may start within an epoch.

    It iterates in the process that reads a `DataLoader`, never in its workers, so that they need no epoch. A
    running iteration keeps its epoch and start. If an iteration begins within an epoch where an earlier one
    began, a warning is logged once.

    A subclass has `_batches`, and `set_epoch`, which calls `_set`. `start_name` names the argument of
    `set_epoch` that sets the start. The other arguments are the subclass's own.

    Attributes:
        shuffle: whether each epoch has its own order.
    """

    shuffle: bool

    def __init__(self, start_name: str, batch_size: int, rank: int, num_ranks: int, seed: int) -> None:
        batch_size, rank = require_integer("batch_size", batch_size), require_integer("rank", rank)
        num_ranks, seed = require_integer("num_ranks", num_ranks), require_integer("seed", seed)
        require_at_least(1, "batch_size", batch_size)
        require(0 <= rank < num_ranks, "rank", rank, f"0 to {num_ranks - 1}, as num_ranks = {num_ranks}")
        require_at_least(0, "seed", seed)
        self._batch_size, self._rank, self._num_ranks, self._seed = batch_size, rank, num_ranks, seed
        self._start_name = start_name
        self._epoch = self._start = 0
        self._is_start_given = False
        self._has_begun = False  # whether an iteration has, with this epoch and start
        self._num_begun = 0  # iterations
        self._is_set = False  # whether `set_epoch` was called
        self._is_repeated = False  # whether two iterations began here without a `set_epoch` between them

    def _compare(self, *division: Any) -> None:
        """Warns if another rank of the job divides its samples in another way; `division` tells how.

        The rank that comes first posts its division in the job's store, so that no rank waits for others.
        """
        if self._num_ranks == 1 or not dist.is_initialized() or self._num_ranks != dist.get_world_size():
            return
        number = _made.setdefault(type(self).__name__, itertools.count())
        key = f"workload_balancer/divisions/{type(self).__name__}/{next(number)}"
        mine = f"seed={self._seed}, batch_size={self._batch_size}, {', '.join(map(str, division))}"
        with suppress(RuntimeError, NotImplementedError):  # a store without this operation
            store = dist.distributed_c10d._get_default_store()
            first = store.compare_set(key, "", mine).decode()
            if first != mine:
                logger.warning(
                    f"rank {dist.get_rank()} has a {type(self).__name__} of {mine}, and another rank one of "
                    f"{first}: ranks would load some samples twice and others never. Make it from the same "
                    "samples, costs, and seed on all ranks"
                )

    def __iter__(self) -> Iterator[Any]:
        # Reads them here, because the body of a generator does not run before its first batch is requested.
        return self._batches(self._epoch, self._start)

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Calls `_begin`, then yields the batches."""

    def _set(self, epoch: int, start: int | None, most: int) -> None:
        """Sets the epoch of the next iterations, and their start. None means the beginning of the epoch.

        A call without a start may come from a loader that counts epochs itself, and calls this before each
        iteration. Such a call must not undo an earlier call with a start, unless an iteration has begun with
        that start. If two iterations began without a call between them, there is no such loader.

        Raises:
            TypeError: `epoch` or `start` is not an integer.
            ValueError: `epoch` or `start` is negative, `start` exceeds `most`, or `epoch` exceeds int64.
            RuntimeError: this call would undo a start.
        """
        epoch = require_integer("epoch", epoch)
        first = 0 if start is None else require_integer(self._start_name, start)
        require(0 <= epoch < 2**63, "epoch", epoch, "at least 0 and below 2 ** 63")
        require(0 <= first <= most, self._start_name, start, f"0 to {most}")
        is_undone = self._is_start_given and (epoch, first) != (self._epoch, self._start)
        if start is None and is_undone and not (self._has_begun or self._is_repeated):
            raise RuntimeError(
                f"set_epoch({epoch}) would undo set_epoch({self._epoch}, {self._start_name}={self._start}), "
                f"with which no iteration has begun: iterate first, or pass {self._start_name}=0 to begin "
                "anew. Loaders that accelerate has prepared call set_epoch with a counter of their own; "
                "iterate over the DataLoader itself"
            )
        self._epoch, self._start, self._is_start_given = epoch, first, start is not None
        self._has_begun, self._is_set = False, True

    def _begin(self, epoch: int, start: int) -> None:
        """Records an iteration at its first batch, because loaders drop some iterations before that."""
        self._num_begun += 1
        if self._num_begun == 2 and self.shuffle and not self._is_set and self._rank == 0:
            _warn_of_order(type(self).__name__)
        if (epoch, start) == (self._epoch, self._start):
            if self._has_begun:
                self._is_repeated = True
                if start:
                    _warn_of_start(f"{self._start_name}={start}", epoch)
            self._has_begun = True


# Numbers of the objects that this process has made, by class.
_made: dict[str, Iterator[int]] = {}


@functools.cache
def _warn_of_order(kind: str) -> None:
    logger.warning(
        f"set_epoch of a {kind} that shuffles was never called, so each epoch has the order of the first: "
        "call set_epoch(epoch) before each epoch"
    )


@functools.cache
def _warn_of_start(start: str, epoch: int) -> None:
    logger.warning(
        f"epoch {epoch} is iterated over again from {start} on, so its beginning is left out again: call "
        "set_epoch for every epoch"
    )
