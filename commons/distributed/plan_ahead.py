"""Plans steps ahead in a thread, while the steps before them train."""

from __future__ import annotations

import atexit
import functools
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from ..named_ranges import named_range
from ..sequence_batch.rows import Rows
from .channel import raised_on
from .loaded_memory import LoadedBatch
from .plan_gather import View
from .planner import Planner
from .rank_group import close_connections
from .shuffle_plan import ShufflePlan
from .step import Step

logger = logging.getLogger(__name__)
_ENDED = object()
# At exit, for planning to end, and for a user's functions that count rows once nothing keeps it waiting.
_PATIENCE_S, _PATIENCE_TO_COUNT_S = 0.5, 10.0
# Steps that are planned while one trains, and one more until that is handed out.
_STEPS_AHEAD = 1
# Steps until planning is timed, and as many as its median is of.
_WARM_UP, _STEPS = 10, 32


class PlanAhead:
    """Takes batches from a loader one step ahead, and hands out planned steps in the loader's order.

    All ranks call `next_step` in lockstep, and hand over a new iterator in the same call. They learn of the
    end of all loaders, or of an error on any rank, in the same call. Until then, or `drop`, no other thread
    plans with the shuffler. The call after that starts anew: the loader may be the same object, as that of a
    DataLoader with persistent workers is in every epoch.

    Args:
        planner, view: those of the shuffler.
        prepare: returns what to exchange of this rank's rows, None once its loader has ended.
        faster: remedies for slow planning, if counting rows takes longer than placing them, and if not.
        device: of the steps, which becomes the planning thread's current one; None for the caller's.

    Attributes:
        failure: error of this rank in a step that was handed out, for all ranks to raise with the next plan.
    """

    def __init__(
        self,
        planner: Planner,
        view: View,
        prepare: Callable[[Rows | None, ShufflePlan], Rows],
        faster: tuple[str, str],
        device: torch.device | None = None,
    ) -> None:
        self._planner, self._view, self._prepare = planner, view, prepare
        self._thread = _Thread(device)
        self._faster, self._warns_if_slow = faster, planner.ranks.rank == 0
        self._times: list[tuple[float, float, float]] = []
        self._loader: Iterator[Any] | None = None
        self._this_rank_ended = False
        self._planned: deque[tuple[Iterator[Any], LoadedBatch | None, Future[Step | None]]] = deque()
        self._handed_out_at = time.perf_counter()
        self._loading = 0.0  # seconds of this call
        self.failure: Exception | None = None

    def next_step(self, loader: Iterator[Any], mode: Any = None) -> Step | None:
        """Returns the next step; None once when the loaders of all ranks have ended.

        Args:
            loader: of this rank's batches.
            mode: a note on the steps whose batches this call loads.

        Raises:
            Exception: the error of any rank's loader, or of planning; on every rank. The batches of its step
                are lost on all ranks. The next call goes on with those that follow.
        """
        busy_seconds = time.perf_counter() - self._handed_out_at
        if loader is not self._loader:
            self._loader, self._this_rank_ended = loader, False
        step = self._next_planned(loader, mode)
        if step is None:
            return None
        self._planner.hand_out(step.plan)
        self._warn_if_slow(busy_seconds)
        self._handed_out_at = time.perf_counter()
        return step

    def _next_planned(self, loader: Iterator[Any], mode: Any) -> Step | None:
        self._loading = waiting = 0.0
        while True:
            while len(self._planned) <= _STEPS_AHEAD:
                loaded, failure = self._load(loader)
                planned = self._thread.submit(self._plan, loaded, failure, mode)
                self._planned.append((loader, loaded, planned))
            from_loader, _, planned = self._planned[0]
            start = time.perf_counter()
            try:
                with named_range("## wait for plan ##"):
                    step = planned.result()
            except BaseException as error:
                if planned.done() and planned.exception() is not None:
                    self._planned.popleft()
                elif isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
                    self.failure = error  # torch raises it wherever a worker's death finds this rank
                    continue
                raise
            self._planned.popleft()
            waiting += time.perf_counter() - start
            if step is not None:
                step.load_seconds, step.wait_seconds = self._loading, waiting
                return step
            if from_loader is loader:
                after_end, self._planned = self._planned, deque()
                try:
                    for *_, planned in after_end:
                        planned.result()  # may have what a rank found in its last step
                finally:
                    self._forget()  # once no plan is on its way
                return None

    def _warn_if_slow(self, busy_seconds: float) -> None:
        """Warns once, on rank 0, if planning takes longer than a step; times serve nothing else.

        By medians, with `busy_seconds` from one call of `next_step` to the other.
        """
        if not self._warns_if_slow:
            return
        self._times.append((*self._planner.seconds, busy_seconds))
        if len(self._times) < _WARM_UP + _STEPS:
            return
        counting, placing, busy = 1e3 * np.median(self._times[_WARM_UP:], axis=0)
        del self._times[_WARM_UP:]
        if counting + placing > busy:
            self._warns_if_slow = False
            logger.warning(
                f"planning takes {counting + placing:.1f} ms per step, and a step that should hide it "
                f"{busy:.1f} ms: every step waits for its plan; "
                f"{self._faster[0 if counting > placing else 1]}"
            )

    @property
    def has_batches(self) -> bool:
        """Whether this rank has loaded batches that were not handed out."""
        return any(loaded is not None for _, loaded, _ in self._planned)

    def drop(self) -> None:
        """Drops batches that were loaded and not handed out; all ranks have to in the same place.

        Nothing of them is left: an error of loading or planning one is only logged.
        """
        for *_, planned in self._planned:
            error = planned.exception()  # waits for the plan, in which other ranks wait for this one
            if error is not None and raised_on(error) is None:
                logger.warning(f"a batch that is dropped had failed: {type(error).__name__}: {error}")
        self._planned.clear()
        self._forget()

    def _forget(self) -> None:
        self._loader, self._this_rank_ended = None, False
        self._planner.release(self._thread.ident)

    def _load(self, loader: Iterator[Any]) -> tuple[LoadedBatch | None, Exception | None]:
        """Returns the next batch, None after the end; and the error of loading."""
        if self._this_rank_ended:  # some loaders hang if asked again after their end
            return None, None
        try:
            with named_range("## load batch ##"):
                start = time.perf_counter()
                batch = next(loader, _ENDED)
                self._loading += time.perf_counter() - start
                if batch is None:
                    raise TypeError(
                        "a loader gave None for a batch; one that has ended raises StopIteration, and one "
                        "without rows for a step goes on to its next batch"
                    )
                self._this_rank_ended = batch is _ENDED
                if batch is _ENDED:
                    return None, None
                loaded = LoadedBatch(self._view(batch))
                for _, waiting, _ in self._planned:
                    if waiting is not None:
                        waiting.check_unchanged(loaded)
                if loaded.on_host is not loaded.rows and self._planner.ranks.rank == 0:
                    _warn_of_device_batches()
                return loaded, None
        except Exception as error:  # the other ranks are told when this step is planned
            return None, error

    def _plan(self, loaded: LoadedBatch | None, failure: Exception | None, mode: Any) -> Step | None:
        """Plans a step, in the planning thread; None if no rank has loaded a batch. Collective."""
        self._planner.reserve()
        if failure is None:
            failure, self.failure = self.failure, None
        plan = self._planner.plan(None if loaded is None else loaded.on_host, failure)
        if not plan.whole.has_batch:
            return None
        rows = None if loaded is None else loaded.rows  # what came on the device stays there
        return Step(self._prepare(rows, plan), plan, mode)


@functools.cache
def _warn_of_device_batches() -> None:
    """Warns once per process, however many loops there are."""
    logger.warning(
        "the loader gives batches on the device: each is copied back to plan with, which waits for the "
        "device. Give batches on the host, pinned, for planning to cost the step nothing"
    )


class _Thread:
    """Runs functions one after another; ends when nothing refers to it, or by `_end_threads`.

    A daemon, unlike those of concurrent.futures: at exit, it may wait for a collective that others have left.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if device == torch.device("cuda") or (device is None and torch.cuda.is_initialized()):
            device = torch.device("cuda", torch.cuda.current_device())
        thread = threading.Thread(target=_run, args=(self._jobs, device), name="plan ahead", daemon=True)
        _jobs_of[thread] = self._jobs
        thread.start()
        self.ident = thread.ident
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
        until = time.monotonic() + _PATIENCE_TO_COUNT_S
        for thread, _ in threads:
            thread.join(max(until - time.monotonic(), 0.0))


def _run(jobs: queue.SimpleQueue[Any], device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has a current device of its own
    while (job := jobs.get()) is not None:
        future, function, arguments = job
        try:
            with named_range("## plan ##"):
                future.set_result(function(*arguments))
        except StopIteration as error:  # from `result`, it would look like the end of the data
            failure = RuntimeError(f"planning raised {error!r}")
            failure.__cause__ = error
            future.set_exception(failure)
            del failure
        except BaseException as error:
            future.set_exception(error)
        del job, future, function, arguments  # else they would live until the next job comes
