"""Stacks of a rank that hangs, in a file."""

from __future__ import annotations

import faulthandler
import logging
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

logger = logging.getLogger(__name__)


class HangWatch:
    """Writes the stacks of all threads if a rank stays in one step for longer than `timeout_s` seconds.

    In a hang, one rank is stuck and the others wait for it, so every rank writes its stacks, to the file
    `<log_dir>/stacks/rank<rank>.txt`. Faulthandler's timer does so even if a call holds the GIL. Training
    keeps waiting, because collectives have their own timeouts. A limit of None disables the watch.
    """

    def __init__(self, log_dir: str, timeout_s: float | None) -> None:
        self._timeout = timeout_s
        self._path = Path(log_dir) / "stacks" / f"rank{dist.get_rank()}.txt"
        self._file: TextIO | None = None

    def __enter__(self) -> HangWatch:
        if self._timeout is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
            except OSError as error:  # such as a full disk, which must not end training
                logger.warning(f"the stacks of a hang will not be written: {error}")
            self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()

    def restart(self) -> None:
        """Restarts the time limit. Call this at the start of each step."""
        if self._timeout is not None and self._file is not None:
            faulthandler.dump_traceback_later(self._timeout, file=self._file)  # takes 0.1 ms
