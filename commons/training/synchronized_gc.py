"""Garbage collection at the same steps on all ranks."""

from __future__ import annotations

import gc


class SynchronizedGC:
    """While active, collects garbage after the same steps on all ranks, and at no other time.

    Python collects after so many allocations, at a different moment on each rank, and every rank waits for
    the pauses of all. Objects that exist at the start are never scanned again. An interval of None leaves
    collections to Python.
    """

    def __init__(self, interval: int | None) -> None:
        self._interval = interval
        self._steps = 0
        self._was_enabled = self._had_frozen = False

    def __enter__(self) -> SynchronizedGC:
        if self._interval is not None:
            self._was_enabled, self._had_frozen = gc.isenabled(), gc.get_freeze_count() > 0
            gc.disable()
            gc.collect()
            gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        if self._interval is not None:
            if not self._had_frozen:  # the program's objects cannot be told apart
                gc.unfreeze()
            if self._was_enabled:
                gc.enable()

    def after_step(self) -> None:
        """Collects if it is time to; call on all ranks after each step, those of evaluations included."""
        self._steps += 1
        if self._interval is not None and self._steps % self._interval == 0:
            gc.collect()
