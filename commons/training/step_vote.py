"""Tells all ranks that one of them was asked to stop or computed a non-finite loss."""

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
from ..distributed.ranks import RankGroup, cause_elsewhere

logger = logging.getLogger(__name__)
# A scheduler that signals every process also signals torchrun, which forwards the signal to its ranks.
_ONE_REQUEST_S = 5.0


class NonFiniteLossError(FloatingPointError):
    """A rank's loss was infinite or NaN. All ranks raise this error at the same point."""


class StepVote(Extension):
    """Tells all ranks that one of them got SIGTERM or computed a non-finite loss.

    This is an extension of the training shuffler. A rank's vote is one integer that travels with the gather
    of each plan, so it adds no collective per step, and nothing waits for it. All ranks see a vote in the
    same step, usually two steps later. `finish` runs one all-gather. Construction is collective.
    """

    name = "step_vote"
    order = 60
    num_posted = 1

    def __init__(self) -> None:
        ranks = RankGroup.of()
        self._channel, self._rank = ranks.channel(), ranks.rank
        self._newest = np.zeros(ranks.num_ranks, dtype=np.int64)  # last gathered votes, by rank
        self._asked_at: float | None = None
        self._requested = False
        self._lock = threading.Lock()  # guards the next two, which the planning thread also uses
        self._unread: deque[_Loss] = deque()
        self._bad_step = 0  # first step with a non-finite loss, or 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While active, SIGTERM requests a graceful stop.

        Python handles signals only in the main thread. In any other thread, rank 0 logs a warning instead.
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
        cause = None
        try:
            yield
        except Exception as error:
            cause = cause_elsewhere(error)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
            if cause is not None and self._asked_at is not None:
                signal.raise_signal(signal.SIGTERM)  # torchrun's, because another rank failed

    def post(self) -> np.ndarray:
        """Returns this rank's vote, without waiting for any loss."""
        return np.array([self._vote(wait=False)])

    def take(self, posted: np.ndarray) -> None:
        """Stores the votes of all ranks."""
        self._newest = posted[:, 0]

    def after_step(self, step: int, loss_sum: torch.Tensor) -> bool:
        """Adds this rank's loss of a step, and returns whether any gathered vote has requested a stop.

        Raises:
            NonFiniteLossError: a gathered vote reports a non-finite loss. All ranks raise it.
        """
        with self._lock:
            self._unread.append(_Loss(step, loss_sum))
        self._count(self._newest)
        return self._requested

    def finish(self) -> None:
        """Votes on all steps so far. All ranks must call this before they save or leave. Collective.

        Raises:
            NonFiniteLossError: the loss of a step so far was not finite. All ranks raise it.
        """
        self._count(self._channel.all_gather(np.array([self._vote(wait=True)]))[:, 0])

    def _vote(self, wait: bool) -> int:
        """Returns this rank's vote: 2 × the first bad step, plus 1 if this rank was asked to stop."""
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
        elif time.monotonic() - self._asked_at > _ONE_REQUEST_S:  # a second request stops at once
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)


class _Loss:
    """A loss that is being copied to the host."""

    def __init__(self, step: int, loss_sum: torch.Tensor) -> None:
        self.step = step
        self._on_host = loss_sum.detach().to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if loss_sum.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def is_there(self) -> bool:
        """Returns whether the copy is complete."""
        return self._copied is None or self._copied.query()

    def read(self) -> float:
        """Waits for the copy, and returns the loss."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._on_host)
