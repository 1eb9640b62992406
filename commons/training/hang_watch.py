"""Reports of a hanging rank: a line on stderr, and the stacks of its threads in a file."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

logger = logging.getLogger(__name__)


class HangWatch:
    """Reports once if a rank stays in one step for longer than `timeout_s`, and again when it continues.

    In a hang, one rank is stuck and the others wait for it, so every rank reports. Faulthandler's timer
    writes the stacks of all Python threads to `<log_dir>/stacks/rank<rank>.txt`, even if a call holds the
    GIL. A watching thread logs the step and the current line of code. Training keeps waiting, because
    collectives have their own timeouts and a rank may only be slow. A limit of None disables the watch.
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
                self._file = self._path.open("a", encoding="utf-8")
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
                    self._path.parent.rmdir()  # fails if other ranks' stacks are there

    def begins(self, what: str) -> None:
        """Restarts the time limit. Call this at the start of each watched activity, such as "step 7"."""
        self._last = (time.monotonic(), what)
        if self._timeout is not None and self._file is not None:
            faulthandler.dump_traceback_later(self._timeout, file=self._file)  # takes 0.1 ms

    def _watch(self, timeout: float) -> None:
        reported = None
        while not self._left.wait(timeout / 20):
            last = self._last
            lasts = time.monotonic() - last[0]
            if reported is not None and last is not reported:
                self._report(f"goes on: {reported[1]} took {last[0] - reported[0]:.0f} s")
                reported = None
            if reported is None and lasts > 1.05 * timeout:  # faulthandler has written by then
                frame = sys._current_frames()[self._watched]
                file = "/".join(Path(frame.f_code.co_filename).parts[-3:])
                where = f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})"
                stacks = f"; the stacks of its threads are in {self._path}" if self._file is not None else ""
                self._report(f"has been in {last[1]} for more than {timeout:g} s, now in {where}", stacks)
                reported = last

    def _report(self, text: str, said_beside: str = "") -> None:
        if self._file is not None:
            with suppress(OSError):  # a full disk
                self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self._rank} {text}\n\n")
                self._file.flush()
        self._say(text + said_beside)

    def _say(self, text: str) -> None:
        logger.warning(f"rank {self._rank} {text}")
