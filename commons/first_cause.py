"""Failures of several ranks, of which only the first is shown."""

from __future__ import annotations

import functools
import sys
import time
from types import TracebackType

from .distributed.ranks import cause_elsewhere, raised_on

__all__ = ["show_first_cause_only"]

# Seconds that a rank waits before it exits because of another rank's failure. Torchrun, which polls ten times
# a second, ends the waiting rank in that time, and names the other rank as the cause.
GRACE_S = 10.0


@functools.cache
def show_first_cause_only() -> None:
    """Makes ranks that fail only because another rank failed print one line instead of a traceback.

    Programs with their own training loop call it on every rank, after `init_process_group`. Without this
    call, every rank prints a traceback, with a note that names the rank that failed first.

    Sets `sys.excepthook`, as `init_process_group` does; the previous hook prints all other errors. After its
    one line, a rank waits `GRACE_S` seconds for torchrun to end it. If it is still running then, and lost a
    connection, it prints the traceback, too.

    Provisional: may change in a minor version.
    """
    show = sys.excepthook

    def show_it(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        line = cause_elsewhere(error)
        if line is not None:
            print(line, file=sys.stderr, flush=True)
            time.sleep(GRACE_S)
        if raised_on(error) is None:
            show(kind, error, where)

    sys.excepthook = show_it
