"""Names for parts of a step, as profilers show them, whichever thread runs them.

torch.profiler follows the thread that starts it, and those of its backward and collectives. That it can be
made to follow all threads is of no use here: in torch 2.13 it then crashes, now and then, when it stops while
one of them computes. So what runs beside the training thread is noted here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from torch.autograd.profiler import record_function

RangeMaker = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class _Follower:
    """Who names the ranges of all threads but one.

    Attributes:
        thread: that is followed anyway.
        range: makes a range of a name.
    """

    thread: int
    range: RangeMaker


_follower: _Follower | None = None


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Names what runs within, as in "## plan ##". Takes some microseconds, and waits for no device."""
    follower = _follower
    beside = follower is not None and threading.get_ident() != follower.thread
    with record_function(name), follower.range(name) if follower and beside else nullcontext():
        yield


@contextmanager
def other_threads_through(make_range: RangeMaker) -> Iterator[None]:
    """Within, named ranges of other threads than this one are also made by `make_range`."""
    global _follower
    before, _follower = _follower, _Follower(threading.get_ident(), make_range)
    try:
        yield
    finally:
        _follower = before


@dataclass(frozen=True)
class RangeOfThread:
    """What a thread did for a time.

    Attributes:
        name: of the range.
        thread: the thread's name.
        thread_id: as the operating system has it.
        start_ns, end_ns: since the epoch.
    """

    name: str
    thread: str
    thread_id: int
    start_ns: int
    end_ns: int


class NotedRanges:
    """Notes ranges of threads, for `other_threads_through`.

    Attributes:
        ended: those that have ended, in the order of their ends.
    """

    def __init__(self) -> None:
        self.ended: list[RangeOfThread] = []

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Notes what runs within."""
        start = time.time_ns()
        try:
            yield
        finally:
            thread = threading.current_thread()
            self.ended.append(
                RangeOfThread(name, thread.name, threading.get_native_id(), start, time.time_ns())
            )
