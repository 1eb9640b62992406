"""Tells all ranks what only one of them knows: a request to stop, or a loss that is not finite."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np
import torch

from ..distributed import Extension
from ..distributed.rank_group import RankGroup

logger = logging.getLogger(__name__)
# A scheduler that signals all processes of a job also signals torchrun, which passes the signal on.
_ONE_REQUEST_S = 5.0


class NonFiniteLossError(FloatingPointError):
    """A rank's loss was infinite or NaN; raised on all ranks in the same place."""


class StepVote(Extension):
    """Tells all ranks that one got SIGTERM, or has computed a loss that is not finite.

    An extension of the shuffler that trains: a rank's vote is a number that travels with the gather of each
    plan. So it takes no collective per step, and nothing waits for it. All ranks learn of it in the same
    step, mostly two after. `finish` takes one all-gather. Construction is collective.
    """

    name = "step_vote"
    order = 60
    num_posted = 1

    def __init__(self) -> None:
        ranks = RankGroup.of()
        self._channel, self._rank = ranks.channel(), ranks.rank
        self._newest = np.zeros(ranks.num_ranks, dtype=np.int64)  # votes of all ranks
        self._asked_at: float | None = None
        self._requested = False
        self._lock = threading.Lock()  # of what follows, which the planning thread reads
        self._unread: deque[_Loss] = deque()
        self._bad_step = 0  # the first with a loss that is not finite; 0 for none

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While active, SIGTERM requests a graceful stop.

        Python takes no signal handler in a thread; there, a warning says so.
        """
        if threading.current_thread() is not threading.main_thread():
            if self._rank == 0:
                logger.warning(
                    "training runs in a thread, which cannot handle signals: SIGTERM ends the process "
                    "without a checkpoint. Train in the main thread to stop gracefully"
                )
            yield
            return
        before = signal.signal(signal.SIGTERM, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def post(self) -> np.ndarray:
        """Returns this rank's vote; waits for no loss."""
        return np.array([self._vote(wait=False)])

    def take(self, posted: np.ndarray) -> None:
        """Takes the votes of all ranks."""
        self._newest = posted[:, 0]

    def after_step(self, step: int, loss_sum: torch.Tensor) -> bool:
        """Takes this rank's loss of a step; returns whether a rank had been asked to stop when it voted.

        Raises:
            NonFiniteLossError: a rank voted that a loss was not finite; raised on all of them.
        """
        with self._lock:
            self._unread.append(_Loss(step, loss_sum))
        self._count(self._newest)
        return self._requested

    def finish(self) -> None:
        """Votes on all steps so far, as all ranks must before they save or leave. Collective.

        Raises:
            NonFiniteLossError: as `after_step`, for all steps so far.
        """
        self._count(self._channel.all_gather(np.array([self._vote(wait=True)]))[:, 0])

    def _vote(self, wait: bool) -> int:
        """Encodes the first bad step, and in the lowest bit a request to stop."""
        with self._lock:
            while self._unread and (wait or self._unread[0].is_there()):
                loss = self._unread.popleft()
                if not self._bad_step and not math.isfinite(loss.read()):
                    self._bad_step = loss.step
            return 2 * self._bad_step + int(self._asked_at is not None)

    def _count(self, votes: np.ndarray) -> None:
        self._requested |= bool((votes & 1).any())
        bad_steps = votes >> 1
        if bad_steps.any():
            step = bad_steps[bad_steps > 0].min()
            raise NonFiniteLossError(
                f"the loss of step {step} is not finite on rank {np.flatnonzero(bad_steps == step)[0]}. "
                "Checkpoints are from before it: resume from the newest with a lower learning rate, or "
                "inspect the samples of that step"
            )

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        elif time.monotonic() - self._asked_at > _ONE_REQUEST_S:  # a second request will not wait
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)


class _Loss:
    """A loss being copied to the host; `read` waits for it."""

    def __init__(self, step: int, loss_sum: torch.Tensor) -> None:
        self.step = step
        self._on_host = loss_sum.detach().to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if loss_sum.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def is_there(self) -> bool:
        """Returns whether the device has computed it."""
        return self._copied is None or self._copied.query()

    def read(self) -> float:
        """Returns the loss; waits until the device has computed it."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._on_host)
