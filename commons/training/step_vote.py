"""What one rank knows and all have to act on: a request to stop, and a loss that is not finite."""

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
# A scheduler that signals all processes of a job signals torchrun too, which passes it on.
_ONE_REQUEST_S = 5.0


class NonFiniteLossError(FloatingPointError):
    """A rank's loss was infinite or no number; raised by all ranks in the same place."""


class StepVote:
    """Tells all ranks that one was asked to stop by SIGTERM, or has computed a loss that is not finite.

    One all-reduce of two host numbers a step, on a gloo group of its own. On a CPU it has the next step to
    finish. On CUDA the host, which is ahead of the device, waits until the device has done the step before,
    and then for the all-reduce, while the device computes the step. Made collectively.

    Args:
        device: where losses are.
    """

    def __init__(self, device: torch.device) -> None:
        self._group = dist.new_group(backend="gloo")
        self._on_cuda = device.type == "cuda"
        self._asked_at: float | None = None
        self._requested = False
        self._loss: _Loss | None = None  # of the last step, where it is not read at once
        self._votes = torch.zeros(2, dtype=torch.int64)
        self._pending: dist.Work | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, SIGTERM is a request to stop, and ends the process no more."""
        before = signal.signal(signal.SIGTERM, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def after_step(self, step: int, loss_sum: torch.Tensor) -> bool:
        """Whether a rank had been asked to stop one step ago. Collective, once a step.

        Args:
            step: the number of the step.
            loss_sum: a scalar, of this rank.

        Raises:
            NonFiniteLossError: the loss of the step before was not finite on a rank; on all of them.
        """
        loss = _Loss(step, loss_sum)
        if self._on_cuda:
            self._tell(self._loss)
            self._loss = loss
            self._hear()
        else:
            self._hear()
            self._tell(loss)
        return self._requested

    def finish(self) -> None:
        """Waits until all is told, as all ranks have to before they save or leave. Collective.

        Raises:
            NonFiniteLossError: as `after_step`, for all steps until now.
        """
        self._hear()
        loss, self._loss = self._loss, None
        if loss is not None:
            self._tell(loss)
            self._hear()

    def _tell(self, loss: _Loss | None) -> None:
        bad = _NO_STEP
        if loss is not None and not math.isfinite(loss.read()):
            # Of the largest of these the step is the first, and of its ranks the first.
            bad = -(loss.step * dist.get_world_size() + dist.get_rank())
        self._votes = torch.tensor([int(self._asked_at is not None or self._requested), bad])
        self._pending = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _hear(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        requested, bad = self._votes.tolist()
        self._requested = bool(requested)
        if bad != _NO_STEP:
            step, rank = divmod(-bad, dist.get_world_size())
            raise NonFiniteLossError(
                f"the loss of step {step} is not finite on rank {rank}. Checkpoints are from before it: go "
                "on from the newest with a lower learning rate, or look at the samples of that step"
            )

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        elif (
            time.monotonic() - self._asked_at > _ONE_REQUEST_S
        ):  # who asks once more is not to be kept waiting
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)


class _Loss:
    """A loss on its way to the host, for which nothing waits before it is read."""

    def __init__(self, step: int, loss_sum: torch.Tensor) -> None:
        self.step = step
        self._on_host = loss_sum.detach().to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if loss_sum.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> float:
        """The loss; waits until the device has computed it."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._on_host)
