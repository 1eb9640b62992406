"""Named ranges of a step for profilers, in any thread.

torch.profiler follows the thread that starts it, and the threads of its backward and collectives. It can
follow all threads, but torch 2.13 then sometimes crashes if the profiler stops while one of them computes. So
this module records the ranges of other threads itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function

RangeMaker = Callable[[str], AbstractContextManager[Any]]

_make_range: RangeMaker = nullcontext


def named_range(name: str) -> AbstractContextManager[Any]:
    """Names the enclosed part of a step, such as "## plan ##". Takes a microsecond without a profiler."""
    # A record_function takes fifteen microseconds, even without a profiler.
    return record_function(name) if torch.autograd._profiler_enabled() else _make_range(name)


@contextmanager
def unfollowed_threads_through(make_range: RangeMaker) -> Iterator[None]:
    """While active, `make_range` makes the named ranges of threads that torch's profiler does not follow."""
    global _make_range
    before, _make_range = _make_range, make_range
    try:
        yield
    finally:
        _make_range = before


class RangeOfThread(NamedTuple):
    """A recorded range of a thread. The id is the operating system's, and times are since the epoch."""

    name: str
    thread: str
    thread_id: int
    start_ns: int
    end_ns: int


@contextmanager
def noted_range(ended: list[RangeOfThread], name: str) -> Iterator[None]:
    """Records the enclosed code as a range, and appends it to `ended`, which is ordered by end time."""
    start = time.time_ns()
    try:
        yield
    finally:
        thread = threading.current_thread()
        ended.append(RangeOfThread(name, thread.name, threading.get_native_id(), start, time.time_ns()))
