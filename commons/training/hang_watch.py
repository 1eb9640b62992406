"""Reports where a rank hangs: a line on stderr, and the stacks of its threads in a file."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch.distributed as dist

logger = logging.getLogger(__name__)


class HangWatch:
    """Reports once when a rank stays in one step for longer than a limit, and again when it goes on.

    In a hang every rank stalls: one is stuck, and the others wait for it. So each rank reports.
    Faulthandler's timer writes the stacks of all Python threads to `<log_dir>/stacks/rank<rank>.txt`, even
    if a call keeps the GIL. A thread names step and place on stderr. Training keeps waiting: collectives have
    time-outs of their own, and a rank may only be slow.

    Args:
        log_dir: parent of the `stacks` folder.
        timeout_s: the limit in seconds; None to watch nothing.
    """

    def __init__(self, log_dir: str, timeout_s: float | None) -> None:
        self._timeout = timeout_s
        self._rank = dist.get_rank()
        self._path = Path(log_dir) / "stacks" / f"rank{self._rank}.txt"
        self._watched = threading.get_ident()
        self._last = (time.monotonic(), "the start")
        self._file: TextIO | None = None
        self._left = threading.Event()

    def __enter__(self) -> HangWatch:
        if self._timeout is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a")
            except OSError as error:
                self._say(f"will not write the stacks of a hang: {error}")
            self.begins("the start")
            self._thread = threading.Thread(target=self._watch, args=(self._timeout,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timeout is None:
            return
        faulthandler.cancel_dump_traceback_later()
        self._left.set()
        self._thread.join()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
                if not self._path.stat().st_size:
                    self._path.unlink()
                    self._path.parent.rmdir()  # fails if it has stacks of other ranks

    def begins(self, what: str) -> None:
        """Restarts the limit; call at the start of each thing that has it to itself, such as "step 7"."""
        self._last = (time.monotonic(), what)
        if self._timeout is not None and self._file is not None:
            faulthandler.dump_traceback_later(self._timeout, file=self._file)  # takes 0.1 ms

    def _watch(self, timeout: float) -> None:
        reported = None
        while not self._left.wait(timeout / 20):
            last = self._last
            if reported is not None and last is not reported:
                self._say(f"goes on: {reported[1]} took {last[0] - reported[0]:.0f} s")
                reported = None
            if reported is None and time.monotonic() - last[0] > timeout:
                self._report(last[1], timeout)
                reported = last

    def _report(self, what: str, timeout: float) -> None:
        where = _place(sys._current_frames()[self._watched])
        text = f"has been in {what} for more than {timeout:g} s, now in {where}"
        if self._file is not None:
            with suppress(OSError):  # a full disk
                self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self._rank} {text}\n\n")
                self._file.flush()
            text += f"; the stacks of its threads are in {self._path}"
        self._say(text)

    def _say(self, text: str) -> None:
        logger.warning(f"rank {self._rank} {text}")


def _place(frame: FrameType) -> str:
    """The place of a thread, as in "all_reduce (torch/distributed/distributed_c10d.py:3021)"."""
    code = frame.f_code
    return f"{code.co_name} ({'/'.join(Path(code.co_filename).parts[-3:])}:{frame.f_lineno})"
