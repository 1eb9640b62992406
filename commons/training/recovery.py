"""What lets a training go on after it was stopped: checkpoints at intervals, and on request."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from commons.training.checkpoint_folder import step_of
from commons.training.checkpoints import Checkpoints
from commons.training.rank_zero_log import warn_once
from commons.training.step_log import StepLog
from commons.training.step_vote import NonFiniteLossError, StepVote
from commons.training.training_args import TrainerArgs
from commons.training.training_state import TrainingState

logger = logging.getLogger(__name__)


class Recovery:
    """Restores the newest checkpoint there is, writes new ones, and stops all ranks on SIGTERM to one.

    Without a checkpoint that is due within the run it only reads `ckpt_load_dir`. Made collectively.

    Args:
        args: of them `ckpt_save_interval`, `ckpt_save_dir`, `ckpt_load_dir`, `ckpt_keep` and the window, at
            whose end alone a checkpoint is written: within, a step's samples are not those loaded for it.
        state: what is saved and restored.
        vote: what tells all ranks of a request to stop.
        num_steps: steps of the run, those before a checkpoint that it starts from included.

    Attributes:
        restored: the checkpoint that `resume` read, if there was one.
    """

    def __init__(self, args: TrainerArgs, state: TrainingState, vote: StepVote, num_steps: int) -> None:
        self._state = state
        self._vote = vote
        self._interval = args.ckpt_save_interval
        self._window = args.balance_window if args.enable_balanced_shuffler else 1
        if self._interval > num_steps:
            warn_once(
                [
                    f"TrainerArgs.ckpt_save_interval = {self._interval} is beyond the run's {num_steps} "
                    f"steps: no checkpoint is written to {args.ckpt_save_dir}, and none is read from it"
                ]
            )
        saves = args.saves_within(num_steps)
        self._saves = Checkpoints(Path(args.ckpt_save_dir), args.ckpt_keep) if saves else None
        self._loads = Checkpoints(Path(args.ckpt_load_dir)) if args.ckpt_load_dir else None
        self._first_step = self._last_saved = 0
        self._stall_seconds = 0.0  # of the last save
        self.restored: Path | None = None

    def resume(self) -> None:
        """Restores the newest whole checkpoint of `ckpt_save_dir`, or else of `ckpt_load_dir`. Collective.

        Raises:
            ValueError: it is of another model or optimiser.
            FileNotFoundError: `ckpt_load_dir` has none.
        """
        if self._saves is not None:
            self._saves.clean()
        for checkpoints in (self._saves, self._loads):
            if checkpoints is None:
                continue
            newest, problems = checkpoints.newest()
            if dist.get_rank() == 0:
                for problem in problems:
                    logger.warning(problem)
            if newest is not None:
                self._state.restore(checkpoints, newest)
                self.restored = newest
                self._first_step = self._last_saved = step_of(newest)
                return
        if self._loads is not None:
            raise FileNotFoundError(f"TrainerArgs.ckpt_load_dir = {self._loads.path}: there is no checkpoint")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, SIGTERM to any rank stops all of them behind a checkpoint.

        Where a bad loss stops them, the checkpoint that is being written, which is from before, is finished.
        """
        if self._saves is None:
            yield
            return
        with self._vote.listening():
            try:
                yield
            except NonFiniteLossError as error:
                try:
                    self._saves.finish()
                except Exception as of_writing:
                    error.add_note(f"the checkpoint of step {self._last_saved} was not written: {of_writing}")
                raise

    def after_step(self, requested: bool, is_last: bool, log: StepLog) -> bool:
        """Saves if it is time to; whether training has to stop here. Collective, after every step.

        Args:
            requested: whether a rank was asked to stop, as the vote has it.
            is_last: whether no step follows.
            log: is told how long training stood still for each checkpoint, and how long writing took.

        Raises:
            NonFiniteLossError: a loss until here was not finite; nothing is saved then.
        """
        if self._saves is None:
            return False
        step = self._state.progress.step
        if (step - self._first_step) % self._window and not is_last:
            return False
        if requested or is_last or step - self._last_saved >= self._interval:
            start = time.perf_counter()
            self._vote.finish()
            self._finish_writing(log, must_be_written=False)
            self._saves.save(step, self._state.to_save())
            self._last_saved, self._stall_seconds = step, time.perf_counter() - start
        if requested or is_last:
            self._finish_writing(log, must_be_written=requested)
        return requested

    def _finish_writing(self, log: StepLog, must_be_written: bool) -> None:
        """Waits for the checkpoint under way; one that could not be written costs no more than a warning.

        But where the job ends with it, that is raised: all since the one before would be lost in silence.
        """
        if self._saves is None:
            return
        try:
            writing_seconds = self._saves.finish()
        except Exception as error:  # a full disk, say: what is trained is worth more than this checkpoint
            if must_be_written:
                raise
            if dist.get_rank() == 0:
                logger.warning(
                    f"the checkpoint of step {self._last_saved} was not written: {error}; what was trained "
                    "is not lost, and the checkpoint before stays"
                )
            return
        if writing_seconds is not None:
            figures = {"stall_ms": self._stall_seconds * 1e3, "writing_ms": writing_seconds * 1e3}
            log.write("checkpoint", figures, step=self._last_saved)
