"""Plans steps ahead in a thread, while the steps before them train."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from ..named_ranges import named_range
from .rank_group import close_connections

Step = TypeVar("Step")
_ENDED = object()
_PATIENCE_S = 0.5


class PlanAhead(Generic[Step]):
    """Takes batches from a loader one step ahead, and hands out planned steps in the loader's order.

    Every rank calls `next_step` in lockstep, and hands over a new iterator in the same call. All ranks then
    load and plan the same number of steps, even if some loaders end early. They learn of the end, or of an
    error on any rank, in the same call.

    Args:
        plan: takes the batch of a step, None after the loader's end, and the error that kept this rank from
            loading it; returns the step, None if no rank has loaded a batch. Collective; the thread calls it
            for one step after another.
        prepare: called with each loaded batch, in the caller's thread.
        device: device of the steps, which becomes the thread's current one; None for the caller's.

    Attributes:
        busy_seconds: from the last step that was handed out to the call for the next one.
    """

    def __init__(
        self,
        plan: Callable[[Any, Exception | None], Step | None],
        prepare: Callable[[Any], Any],
        device: torch.device | None = None,
    ) -> None:
        self._plan = plan
        self._prepare = prepare
        self._thread = _Thread(device)
        self._loader: Iterator[Any] | None = None
        self._this_rank_ended = self._all_ended = False
        self._planned: deque[tuple[Iterator[Any], Future[Step | None]]] = deque()
        self._dropped_error: BaseException | None = None
        self.busy_seconds, self._handed_out_at = 0.0, time.perf_counter()

    def next_step(self, loader: Iterator[Any]) -> tuple[Step, float] | None:
        """Returns the next step, and the seconds waited for it; None once the loaders have ended.

        Raises:
            Exception: the error of any rank's loader, or of planning; on every rank. The batches of its step
                are lost on all ranks. The next call goes on with those that follow.
        """
        self.busy_seconds = time.perf_counter() - self._handed_out_at
        if loader is not self._loader:
            self._loader, self._this_rank_ended, self._all_ended = loader, False, False
        if self._dropped_error is not None:
            error, self._dropped_error = self._dropped_error, None
            raise error
        if self._all_ended:
            return None
        seconds = 0.0
        while True:
            while len(self._planned) < 2:  # the step after this one is planned while this one trains
                self._planned.append((loader, self._thread.submit(self._plan, *self._load(loader))))
            of_loader, planned = self._planned.popleft()
            start = time.perf_counter()
            with named_range("## wait for plan ##"):
                step = planned.result()
            seconds += time.perf_counter() - start
            if step is not None:
                self._handed_out_at = time.perf_counter()
                return step, seconds
            if of_loader is loader:
                self.drop()
                self._all_ended = True
                return None

    def drop(self) -> None:
        """Drops batches that were loaded and not handed out; all ranks have to in the same place.

        If planning one of them failed, the next `next_step` raises the error.
        """
        for _, planned in self._planned:
            error = planned.exception()  # waits for the plan, in which other ranks wait for this one
            self._dropped_error = self._dropped_error or error
        self._planned.clear()

    def _load(self, loader: Iterator[Any]) -> tuple[Any, Exception | None]:
        """Returns the next batch, None after the end; and the error that kept this rank from loading it."""
        if self._this_rank_ended:  # some loaders hang if asked again after their end
            return None, None
        try:
            with named_range("## load batch ##"):
                batch = next(loader, _ENDED)
                if batch is None:
                    raise TypeError(
                        "a loader gave None for a batch; one that has ended raises StopIteration, and one "
                        "without rows for a step goes on to its next batch"
                    )
                self._this_rank_ended = batch is _ENDED
                return (None if batch is _ENDED else self._prepare(batch)), None
        except Exception as error:  # the other ranks are told when this step is planned
            return None, error


class _Thread:
    """Runs functions one after another; ends when nothing refers to it.

    A daemon, unlike those of concurrent.futures: waiting at exit for a collective that another rank has left
    would keep this process from ending. `_end_threads` ends it.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if (device is None or device == torch.device("cuda")) and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        thread = threading.Thread(target=_run, args=(self._jobs, device), name="plan ahead", daemon=True)
        _jobs_of[thread] = self._jobs
        thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, function, arguments))
        return future


_jobs_of: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any]] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """Ends the threads before the interpreter ends.

    Until 3.14, Python unwinds the stack of a daemon thread that comes back from C++ after that, and the
    process aborts with "terminate called without an active exception".
    """
    threads = list(_jobs_of.items())
    for _, jobs in threads:
        jobs.put(None)
    for thread, _ in threads:
        thread.join(_PATIENCE_S)
    if any(thread.is_alive() for thread, _ in threads):  # one waits for a rank that has failed, or left
        close_connections()
        for thread, _ in threads:
            thread.join(_PATIENCE_S)


def _run(jobs: queue.SimpleQueue[Any], device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has a current device of its own
    while (job := jobs.get()) is not None:
        future, function, arguments = job
        try:
            with named_range("## plan ##"):
                planned = function(*arguments)
            future.set_result(planned)
            del planned
        except BaseException as error:
            future.set_exception(error)
        del job, future, function, arguments  # else they would live until the next job comes
