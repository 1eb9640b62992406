"""The epoch of the next iteration and where it starts, known in the workers of data loaders, too."""

from __future__ import annotations

import functools
import logging
import os
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ..checks import require

logger = logging.getLogger(__name__)
# Epoch and start are one int64 in shared memory, so that nobody reads one of them without the other.
_START_BITS = 32


class EpochStart:
    """Base of what iterates over epochs and may start within one; `set_epoch` of a subclass calls `_set`.

    A `DataLoader` copies its dataset into worker processes. Workers begin their first iteration with the
    numbers that were copied. Persistent ones begin each later iteration with those that the loader's process
    has set by then, which they read in shared memory. An iteration keeps the numbers that it began with.
    One that begins within an epoch although an earlier one has begun there, too, is warned of once.

    A copy has numbers of its own, and so has every process that sets them.

    Args:
        start_name: argument of the subclass's `set_epoch` that says where to start.
    """

    def __init__(self, start_name: str) -> None:
        self._start_name = start_name
        self._epoch = self._start = 0
        self._has_begun = False  # since `_set`, in this process
        self._is_newest = True  # only persistent workers are not told
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if get_spawning_popen() is None:  # a copy that does not go to a process that is being started
            state["_shared"] = self._shared.clone()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()

    def _share(self) -> None:
        # The numbers; and the process whose workers have begun since they were set, or 0.
        self._shared = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()
        self._process = os.getpid()

    def _set(self, epoch: int, start: int | None, most: int) -> None:
        """Sets the epoch of the next iterations, and where they start; None for the beginning.

        Raises:
            ValueError: `epoch` or `start` is negative, `start` is above `most`, or one has too many bits.
            RuntimeError: `start` is None and no iteration has begun at a start that was set before; or
                workers of this process have begun, but with numbers of the process that it was copied from.
        """
        require(0 <= epoch < 2**31, "epoch", epoch, f"at least 0 and at most {2**31 - 1}")
        most = min(most, 2**_START_BITS - 1)
        require(0 <= (start or 0) <= most, self._start_name, start, f"0 to {most}")
        is_worker, process = get_worker_info() is not None, os.getpid()
        have_workers_begun = not is_worker and int(self._shared[1]) == process
        if start is None and self._start and not (self._has_begun or have_workers_begun):
            raise RuntimeError(
                f"set_epoch({epoch}) would undo set_epoch({self._epoch}, {self._start_name}={self._start}), "
                f"with which no iteration has begun: iterate first, or pass {self._start_name}=0 to begin "
                "anew. Loaders that accelerate has prepared call set_epoch with a counter of their own; "
                "iterate over the DataLoader itself"
            )
        if not is_worker and self._process != process:
            if have_workers_begun:
                raise RuntimeError(
                    f"set_epoch({epoch}) cannot reach the workers of process {process}, which have begun "
                    f"with what process {self._process} shares: call set_epoch before the first iteration, "
                    f"or make the {type(self).__name__} in this process"
                )
            self._share()
        self._epoch, self._start = int(epoch), int(start or 0)
        self._has_begun, self._is_newest = False, True
        if not is_worker:
            self._shared[1] = 0
            self._shared[0] = self._packed()

    def _begin(self) -> tuple[int, int]:
        """Returns the epoch and the start of an iteration that begins now."""
        if self._has_begun and self._start and get_worker_info() is None:
            _warn_of_start(f"{self._start_name}={self._start}", self._epoch)
        self._has_begun = True
        if get_worker_info() is not None:
            if not self._is_newest:
                self._epoch, self._start = divmod(int(self._shared[0]), 2**_START_BITS)
            self._is_newest = False
            loader = parent_process()
            if loader is not None and int(self._shared[0]) == self._packed():
                self._shared[1] = loader.pid or 0
        return self._epoch, self._start

    def _packed(self) -> int:
        return (self._epoch << _START_BITS) + self._start


@functools.cache
def _warn_of_start(start: str, epoch: int) -> None:
    """Warns once per process, epoch and start."""
    logger.warning(
        f"epoch {epoch} is iterated over again from {start} on, without what comes before: call set_epoch "
        "for every epoch"
    )
