"""Says where a rank stands that has not come on for long."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO

import torch.distributed as dist

logger = logging.getLogger(__name__)

# Python's own thread reports first; one in C does, this much later, if a call keeps the GIL and so stops it.
_FALLBACK_AFTER = 1.2


class HangWatch:
    """Writes the stacks of all threads of this rank when it does not come on for longer than a limit.

    In a hang no rank comes on: each waits for one that is stuck, or is it. So each reports, once for each
    hang, in a line on stderr and, with all stacks, in `<log_dir>/stacks/rank<rank>.txt`. Then it goes on
    waiting: a collective has a time-out of its own, and what was only slow is not lost. A thread of its own
    watches; what it watches does no more than set a variable. Where the file cannot be written the line on
    stderr is all there is.

    Args:
        log_dir: where the folder of the stacks goes.
        timeout_s: the limit in seconds; None to watch nothing.
    """

    def __init__(self, log_dir: str, timeout_s: float | None) -> None:
        self._timeout = timeout_s
        self._path = Path(log_dir) / "stacks" / f"rank{dist.get_rank()}.txt"
        self._rank = dist.get_rank()
        self._watched = threading.get_ident()
        self._last = (time.monotonic(), "the start")
        self._file: TextIO | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)

    def __enter__(self) -> HangWatch:
        if self._timeout is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a")
            except OSError as error:
                self._say(f"will not write the stacks of a hang: {error}")
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timeout is None:
            return
        self._left.set()
        self._thread.join()
        if self._file is not None:
            with suppress(OSError):  # what it says has been tried to be written before
                self._file.close()
            with suppress(OSError):
                if not self._path.stat().st_size:
                    self._path.unlink()
                    self._path.parent.rmdir()  # unless other ranks' are in it

    def begins(self, what: str) -> None:
        """Said at each thing that has the time limit to itself, as in "step 7"."""
        self._last = (time.monotonic(), what)

    def _watch(self) -> None:
        timeout = self._timeout or 0.0
        armed = reported = None
        while not self._left.wait(timeout / 20):
            last = self._last
            if last is not armed:
                if reported is not None:
                    self._say(f"goes on: {reported[1]} took {last[0] - reported[0]:.0f} s")
                armed, reported = last, None
                if self._file is not None:
                    faulthandler.dump_traceback_later(timeout * _FALLBACK_AFTER, file=self._file)
            elif reported is None and time.monotonic() - last[0] > timeout:
                faulthandler.cancel_dump_traceback_later()
                self._report(last[1])
                reported = last
        faulthandler.cancel_dump_traceback_later()

    def _report(self, what: str) -> None:
        frames = sys._current_frames()
        where = _place(frames[self._watched])
        text = f"has been in {what} for more than {self._timeout:g} s, now in {where}"
        try:
            written = self._write(what, frames)
        except OSError as error:
            self._say(f"{text}; the stacks of its threads could not be written: {error}")
        else:
            self._say(f"{text}; the stacks of its threads are in {self._path}" if written else text)

    def _write(self, what: str, frames: dict[int, FrameType]) -> bool:
        if self._file is None:
            return False
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.write(f"{now} rank {self._rank} in {what} for more than {self._timeout:g} s\n")
        for thread in threading.enumerate():
            if thread is not self._thread and thread.ident in frames:
                stack = "".join(traceback.format_stack(frames[thread.ident]))
                self._file.write(f"\nthread {thread.name}\n{stack}")
        self._file.write("\n")
        self._file.flush()
        return True

    def _say(self, text: str) -> None:
        logger.warning(f"rank {self._rank} {text}")


def _place(frame: FrameType) -> str:
    """Where a thread is, as in "all_reduce (torch/distributed/distributed_c10d.py:3021)"."""
    code = frame.f_code
    return f"{code.co_name} ({'/'.join(Path(code.co_filename).parts[-3:])}:{frame.f_lineno})"
