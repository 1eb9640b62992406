"""Python's garbage collected at the same steps on all ranks."""

from __future__ import annotations

import gc
from types import TracebackType


class SharedCollection:
    """Within, garbage is collected when all ranks do so, and at no other time.

    Python collects on its own when it has made so many objects: at another moment on each rank, and a pause
    of one is a wait of all. Objects that are there at the start are not looked at any more.

    Args:
        interval: steps from one collection to the next; None leaves it to Python.
    """

    def __init__(self, interval: int | None) -> None:
        self._interval = interval
        self._steps = 0
        self._was_enabled = False

    def __enter__(self) -> SharedCollection:
        if self._interval is not None:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect()
            gc.freeze()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._interval is not None:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()

    def after_step(self) -> None:
        """Collects if it is time to; called by all ranks after as many steps, be it of an evaluation."""
        if self._interval is None:
            return
        self._steps += 1
        if self._steps % self._interval == 0:
            gc.collect()
