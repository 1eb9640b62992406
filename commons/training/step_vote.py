"""Tells all ranks what only one of them knows: a request to stop, or a loss that is not finite."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

_NO_STEP = torch.iinfo(torch.int64).min
# A scheduler that signals all processes of a job also signals torchrun, which passes the signal on.
_ONE_REQUEST_S = 5.0


class NonFiniteLossError(FloatingPointError):
    """A rank's loss was infinite or NaN; raised on all ranks in the same place."""


class StepVote:
    """Tells all ranks that one got SIGTERM, or has computed a loss that is not finite.

    Takes one all-reduce of two host numbers per step, on a separate gloo group. On a CPU it has the whole
    next step to finish. On CUDA the host, which runs ahead of the device, waits for the device to finish the
    step before, and then for the all-reduce, while the device computes. Construction is collective.

    Args:
        device: device of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._group = dist.new_group(backend="gloo")
        self._on_cuda = device.type == "cuda"
        self._asked_at: float | None = None
        self._requested = False
        self._loss: _Loss | None = None  # of the last step, if not read at once
        self._votes = torch.zeros(2, dtype=torch.int64)
        self._pending: dist.Work | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While active, SIGTERM requests a graceful stop."""
        before = signal.signal(signal.SIGTERM, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def after_step(self, step: int, loss_sum: torch.Tensor) -> bool:
        """Returns whether a rank had been asked to stop one step ago. Collective, once per step.

        Args:
            step: number of the step.
            loss_sum: this rank's loss sum, a scalar.

        Raises:
            NonFiniteLossError: the loss of the step before was not finite on a rank; raised on all of them.
        """
        loss = _Loss(step, loss_sum)
        if self._on_cuda:
            self._post(self._loss)
            self._loss = loss
            self._collect()
        else:
            self._collect()
            self._post(loss)
        return self._requested

    def finish(self) -> None:
        """Waits for all votes, as all ranks must before they save or leave. Collective.

        Raises:
            NonFiniteLossError: as `after_step`, for all steps so far.
        """
        self._collect()
        loss, self._loss = self._loss, None
        if loss is not None:
            self._post(loss)
            self._collect()

    def _post(self, loss: _Loss | None) -> None:
        bad = _NO_STEP
        if loss is not None and not math.isfinite(loss.read()):
            # The largest of these is the first step, and its first rank.
            bad = -(loss.step * dist.get_world_size() + dist.get_rank())
        self._votes = torch.tensor([int(self._asked_at is not None or self._requested), bad])
        self._pending = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _collect(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        requested, bad = self._votes.tolist()
        self._requested = bool(requested)
        if bad != _NO_STEP:
            step, rank = divmod(-bad, dist.get_world_size())
            raise NonFiniteLossError(
                f"the loss of step {step} is not finite on rank {rank}. Checkpoints are from before it: "
                "resume from the newest with a lower learning rate, or inspect the samples of that step"
            )

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        elif time.monotonic() - self._asked_at > _ONE_REQUEST_S:  # a second request will not wait
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)


class _Loss:
    """A loss on its way to the host; nothing waits for it before `read`."""

    def __init__(self, step: int, loss_sum: torch.Tensor) -> None:
        self.step = step
        self._on_host = loss_sum.detach().to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if loss_sum.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> float:
        """Returns the loss; waits until the device has computed it."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._on_host)
