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
from typing import Any

import torch
from torch.autograd.profiler import record_function

RangeMaker = Callable[[str], AbstractContextManager[Any]]

_make_range: RangeMaker = nullcontext


def named_range(name: str) -> AbstractContextManager[Any]:
    """Names what runs within, as in "## plan ##". Without a profiler it takes a microsecond."""
    # A record_function takes some fifteen, whether anyone listens or not.
    return record_function(name) if torch.autograd._profiler_enabled() else _make_range(name)


@contextmanager
def unfollowed_threads_through(make_range: RangeMaker) -> Iterator[None]:
    """Within, named ranges of threads that torch's profiler does not follow are made by `make_range`."""
    global _make_range
    before, _make_range = _make_range, make_range
    try:
        yield
    finally:
        _make_range = before


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
    """Notes ranges of threads, for `unfollowed_threads_through`.

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
