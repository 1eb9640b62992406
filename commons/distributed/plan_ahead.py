"""Loads and plans steps ahead, in a thread, while earlier steps train."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch

from ..named_ranges import named_range
from ..warn_once import warn_once
from .counting import LoadedBatch
from .exchange import Step, view_of
from .planner import Planner
from .ranks import close_connections, raised_on

logger = logging.getLogger(__name__)
_ENDED = object()
# Seconds to wait at exit: for planning to end, then, with connections closed, for a user's counting to end.
_PATIENCE_S, _PATIENCE_TO_COUNT_S = 0.5, 10.0
# Steps that are planned while one trains. `next_step` submits one more before it hands out the first.
_STEPS_AHEAD = 1
# Batches of an epoch that are watched for changes while they wait. A loader that fills batches again does so
# from the first ones on.
_WATCHED = 16


class PlanAhead:
    """Loads and plans batches one step ahead, and hands out planned steps in the loader's order.

    All ranks call `next_step` in lockstep, and pass a new iterator in the same call. They also learn of the
    end of all loaders, or of an error on any rank, in the same call. Until the end, or `drop`, no other
    thread can plan with the shuffler. The call after the end starts a new epoch. It may pass the same
    iterator, because a DataLoader with persistent workers reuses one object in all epochs.

    Args:
        planner: the shuffler's planner.
        device: device of the steps, made current in the planning thread. None means the caller's device.

    Attributes:
        failure: this rank's error in a step that was handed out. All ranks raise it with the next plan.
    """

    def __init__(self, planner: Planner, device: torch.device | None = None) -> None:
        self._planner = planner
        self._thread = _PlanningThread(device)
        self._thread.start()
        weakref.finalize(self, self._thread.jobs.put, None)
        self._loader: Iterator[Any] | None = None
        self._this_rank_ended, self._num_loaded = False, 0
        self._planned: deque[tuple[Iterator[Any], LoadedBatch | None, Future[Step | None]]] = deque()
        self._loading = 0.0  # seconds in this call
        self.failure: Exception | None = None

    def next_step(self, loader: Iterator[Any]) -> Step | None:
        """Returns the next step, or a single None when the loaders of all ranks have ended.

        Args:
            loader: iterator over this rank's batches.

        Raises:
            Exception: loading failed on any rank, or planning failed. Every rank raises the error, and loses
                its batch of that step. The next call continues with the batches that follow.
        """
        if loader is not self._loader:
            self._loader, self._this_rank_ended, self._num_loaded = loader, False, 0
        self._loading = waiting = 0.0
        while True:
            while len(self._planned) <= _STEPS_AHEAD:
                loaded, failure = self._load(loader)
                planned: Future[Step | None] = Future()
                self._thread.jobs.put((planned, self._plan, loaded, failure))
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
                    self.failure = error  # torch raises it from a signal handler, at any time
                    continue
                raise
            self._planned.popleft()
            waiting += time.perf_counter() - start
            if step is not None:
                step.load_seconds, step.wait_seconds = self._loading, waiting
                self._planner.hand_out(step.plan)
                return step
            if from_loader is loader:
                after_end, self._planned = self._planned, deque()
                try:
                    for *_, planned in after_end:
                        planned.result()  # may raise an error of a rank's last step
                finally:
                    self._forget()  # only after the last plan has ended
                return None

    def drop(self) -> None:
        """Drops batches that were loaded but not handed out. All ranks must call it at the same point.

        An error in loading or planning a dropped batch is only logged.
        """
        for *_, planned in self._planned:
            error = planned.exception()  # waits for the plan, in which other ranks need this rank
            if error is not None and raised_on(error) is None:
                logger.warning(f"a batch that is dropped had failed: {type(error).__name__}: {error}")
        self._planned.clear()
        self._forget()

    def _forget(self) -> None:
        self._loader, self._this_rank_ended = None, False
        self._planner.release(self._thread.ident)

    def _load(self, loader: Iterator[Any]) -> tuple[LoadedBatch | None, Exception | None]:
        """Returns the next batch (None after the end), and the error if loading failed."""
        if self._this_rank_ended:  # some loaders hang if asked again after their end
            return None, None
        try:
            with named_range("## load batch ##"):
                start = time.perf_counter()
                batch = next(loader, _ENDED)
                self._loading += time.perf_counter() - start
                self._this_rank_ended = batch is _ENDED
                if batch is _ENDED:
                    return None, None
                self._num_loaded += 1
                watched = self._num_loaded <= _WATCHED or self._planner.verifies
                loaded = LoadedBatch(view_of(batch, self._planner.shared_fields), watched)
                for _, waiting, _ in self._planned:
                    if waiting is not None:
                        waiting.check_unchanged()
                if loaded.on_host is not loaded.rows and self._planner.ranks.rank == 0:
                    warn_once(
                        logger, "planning waits for batches on the device: load them pinned, on the host"
                    )
                return loaded, None
        except Exception as error:  # planning this step tells the other ranks
            return None, error

    def _plan(self, loaded: LoadedBatch | None, failure: Exception | None) -> Step | None:
        """Plans a step, in the planning thread. Returns None if no rank has loaded a batch. Collective."""
        self._planner.reserve()
        if failure is None:
            failure, self.failure = self.failure, None
        plan = self._planner.plan(None if loaded is None else loaded.on_host, failure)
        if not plan.whole.has_batch:
            return None
        rows = None if loaded is None else loaded.rows  # rows that were loaded on the device stay there
        return Step(self._planner.prepare(rows, plan), plan)


class _PlanningThread(threading.Thread):
    """Runs jobs (future, function, arguments) one after another, until it gets None for a job.

    It is a daemon, unlike threads of concurrent.futures, because at exit it may wait for ranks that left.
    """

    def __init__(self, device: torch.device | None) -> None:
        super().__init__(target=self._run, name="plan ahead", daemon=True)
        if device == torch.device("cuda") or (device is None and torch.cuda.is_initialized()):
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own current device
        while (job := self.jobs.get()) is not None:
            future, function, *arguments = job
            try:
                with named_range("## plan ##"):
                    future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
            del job, future, function, arguments  # otherwise, they would live until the next job


@atexit.register
def _end_threads() -> None:
    """Ends the threads before the interpreter shuts down.

    Before 3.14, Python unwinds the stack of a daemon thread that returns from C++ during shutdown, and the
    process aborts with "terminate called without an active exception".
    """
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _PlanningThread)]
    for thread in threads:
        thread.jobs.put(None)
    for thread in threads:
        thread.join(_PATIENCE_S)
    if any(thread.is_alive() for thread in threads):  # one waits for a rank that has failed or left
        close_connections()
        until = time.monotonic() + _PATIENCE_TO_COUNT_S
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
