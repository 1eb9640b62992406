"""A signal to one rank, on which all ranks stop in the same step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist


class StopRequest:
    """Whether any rank was asked to stop, by SIGTERM; the same answer on all ranks. Made collectively.

    One all-reduce of a host number a step, on a gloo group of its own, which has the next step to finish.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._asked = False
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._pending: dist.Work | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, SIGTERM is a request to stop, and ends the process no more."""
        before = signal.signal(signal.SIGTERM, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def after_step(self) -> bool:
        """Whether a rank had been asked when the step before this one was done. Collective, once a step."""
        requested = False
        if self._pending is not None:
            self._pending.wait()
            requested = bool(self._flag)
        self._flag = torch.tensor([int(self._asked or requested)])
        self._pending = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return requested

    def finish(self) -> None:
        """Waits for what is under way, as all ranks have to before they leave."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whoever sends a second one is not to be kept waiting
