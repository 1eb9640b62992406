"""Iteration over one rank's part of each epoch, in a process or in the workers of a data loader."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info

from ..argument_checks import require, require_at_least, require_integer

logger = logging.getLogger(__name__)


class EpochStart:
    """Base class of iterables over a rank's part of each epoch, which may start within an epoch.

    A `DataLoader` copies its dataset into worker processes. A worker begins its first iteration with the
    copied epoch and start. A persistent worker begins each later iteration with the epoch and start that the
    loader's process has set by then, which it reads from shared memory. A running iteration keeps its epoch
    and start. If an iteration begins within an epoch where an earlier one began, a warning is logged once.

    A copy has its own epoch and start, and so does every process that sets them.

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
        self._begun_in = 0  # the process where an iteration last began with this epoch and start
        self._is_set = False  # whether `set_epoch` was called
        self._is_repeated = False  # whether two iterations began here without a `set_epoch` between them
        self._share()

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
        return self._batches(*self._upcoming())

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Calls `_begin`, then yields the batches."""

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if get_spawning_popen() is None:  # a copy that is not for a process being spawned
            del state["_shared"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_shared" not in state:
            self._share()

    def _share(self) -> None:
        # Epoch, start, the process whose workers have begun with them, or 0, and the number of iterations
        # that have. Python keeps many such arrays in one file, so that no dataset costs a file descriptor.
        self._shared = RawArray("q", [self._epoch, self._start, 0, 0])
        self._process = os.getpid()

    def _set(self, epoch: int, start: int | None, most: int) -> None:
        """Sets the epoch of the next iterations, and their start. None means the beginning of the epoch.

        A call without a start may come from a loader that counts epochs itself, and calls this before each
        iteration. Such a call must not undo an earlier call with a start, unless an iteration has begun with
        that start. If two iterations began without a call between them, there is no such loader.

        Raises:
            TypeError: `epoch` or `start` is not an integer.
            ValueError: `epoch` or `start` is negative, `start` exceeds `most`, or `epoch` exceeds int64.
            RuntimeError: this call would undo a start, or workers of this process have begun and read the
                shared memory of the process that this object was copied from.
        """
        epoch = require_integer("epoch", epoch)
        first = 0 if start is None else require_integer(self._start_name, start)
        require(0 <= epoch < 2**63, "epoch", epoch, "at least 0 and below 2 ** 63")
        require(0 <= first <= most, self._start_name, start, f"0 to {most}")
        is_worker, process = get_worker_info() is not None, os.getpid()
        have_workers_begun = not is_worker and self._shared[2] == process
        has_begun = self._begun_in or have_workers_begun or self._is_repeated
        is_undone = self._is_start_given and (epoch, first) != (self._epoch, self._start)
        if start is None and is_undone and not has_begun:
            raise RuntimeError(
                f"set_epoch({epoch}) would undo set_epoch({self._epoch}, {self._start_name}={self._start}), "
                f"with which no iteration has begun: iterate first, or pass {self._start_name}=0 to begin "
                "anew. Loaders that accelerate has prepared call set_epoch with a counter of their own; "
                "iterate over the DataLoader itself"
            )
        if self._process != process and have_workers_begun:
            raise RuntimeError(
                f"set_epoch({epoch}) cannot reach the workers of process {process}, which have begun "
                f"with what process {self._process} shares: call set_epoch before the first iteration, "
                f"or make the {type(self).__name__} in this process"
            )
        self._epoch, self._start, self._is_start_given, self._begun_in = epoch, first, start is not None, 0
        self._is_set = True
        if is_worker:
            return  # a worker sets only its own epoch and start
        if self._process == process:
            self._shared[:] = [epoch, first, 0, 0]
        else:
            self._share()

    def _upcoming(self) -> tuple[int, int]:
        """Returns the epoch and the start of an iteration that is requested now."""
        if get_worker_info() is not None and self._begun_in == os.getpid():
            self._epoch, self._start, *_ = self._shared  # persistent workers get no other update
        return self._epoch, self._start

    def _begin(self, epoch: int, start: int) -> None:
        """Records an iteration at its first batch, because loaders drop some iterations before that."""
        if getattr(get_worker_info(), "id", 0) == 0:
            self._shared[3] += 1
            if self._shared[3] == 2 and self.shuffle and not self._is_set and self._rank == 0:
                _warn_of_order(type(self).__name__)
        is_newest = (epoch, start) == (self._epoch, self._start)
        if get_worker_info() is not None:
            if self._shared[:2] == [epoch, start]:
                loader = parent_process()
                self._shared[2] = (loader and loader.pid) or 0
        elif is_newest and self._begun_in:
            self._is_repeated = True
            if start:
                _warn_of_start(f"{self._start_name}={start}", epoch)
        if is_newest:
            self._begun_in = os.getpid()


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
