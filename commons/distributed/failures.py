"""One rank's exception, raised on all."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch.distributed as dist

# A rank that fails because of another one ends so much later. Torchrun, which looks ten times a second, then
# ends it, and names the other one as the cause.
GRACE_S = 10.0
_RAISED_ON = "raised_on_another_rank"
_LOST = (dist.DistBackendError, dist.DistNetworkError)  # of messages, and of the job's store


def portable(failure: Exception) -> Exception:
    """Returns a copy of a failure to send to other ranks; its traceback, which does not pickle, is a note."""
    if raised_on(failure) is not None:
        return failure
    where = "".join(traceback.format_exception(failure))
    try:
        copied = pickle.loads(pickle.dumps(failure))
    except Exception:
        copied = RuntimeError(f"{type(failure).__name__}: {failure}")
    rank = _this_rank()
    copied.add_note(f"raised on rank {rank}:\n{where}")
    copied.__dict__[_RAISED_ON] = rank
    return copied


def raised_on(error: BaseException) -> int | None:
    """Returns the other rank that raised this error, and will report it; None for one of this rank's."""
    return error.__dict__.get(_RAISED_ON)


def cause_elsewhere(error: BaseException) -> str | None:
    """Returns a line about the other rank's failure that this error follows from; None for one of its own."""
    if (rank := raised_on(error)) is not None:
        reason = f"rank {rank} raised {type(error).__name__}, and shows the traceback"
    elif isinstance(error, _LOST) or "gloo/transport" in str(error):
        reason = (
            "it lost the connection to another rank: that one's traceback is the cause, or the signal that "
            "torchrun shows for it, as -9 where memory ran out"
        )
    else:
        return None
    return f"rank {_this_rank()} ends, because {reason}"


@contextmanager
def note_if_lost() -> Iterator[None]:
    """While active, an error of a lost connection gets a note that another rank shows the cause."""
    try:
        yield
    except RuntimeError as error:
        if (line := cause_elsewhere(error)) is not None:
            error.add_note(line)
        raise


@functools.cache
def show_first_cause_only() -> None:
    """Has ranks that another rank's failure ends print one line in place of a traceback.

    For a program with a loop of its own: call it on every rank, after `init_process_group`. Without it each
    rank prints a traceback, in which a note names the rank that failed first.

    Sets `sys.excepthook`, as `init_process_group` does; what it was before prints the other errors. A rank
    that another one's failure ends waits `GRACE_S` for torchrun to end it. A lost connection has its
    traceback, too, if nothing ends this rank within that time.
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


def _this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
