"""Garbage collection at the same steps on all ranks."""

from __future__ import annotations

import gc


class SynchronizedGC:
    """While active, collects garbage after the same steps on all ranks, and at no other time.

    Python triggers collections by the number of allocations, at a different moment on each rank, and every
    rank would wait for every other rank's pauses. Objects that exist at the start are not scanned while this
    is active. An interval of None leaves collections to Python.
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
            if not self._had_frozen:  # else the program's own frozen objects would thaw
                gc.unfreeze()
            if self._was_enabled:
                gc.enable()

    def after_step(self) -> None:
        """Collects if a collection is due. Call this on all ranks after each training or evaluation step."""
        self._steps += 1
        if self._interval is not None and self._steps % self._interval == 0:
            gc.collect()
