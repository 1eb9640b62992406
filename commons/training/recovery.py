"""Stopping and resuming a training: checkpoints at intervals and on SIGTERM."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from .checkpoints import Checkpoints, step_of
from .run_log import RunRecord, warn_once
from .step_vote import NonFiniteLossError, StepVote
from .training_args import TrainerArgs
from .training_state import TrainingState

logger = logging.getLogger(__name__)


class Recovery:
    """Restores the newest checkpoint, writes new ones, and stops all ranks when one of them gets SIGTERM.

    If no checkpoint is due within the run, only reads `ckpt_load_dir`. `num_steps` counts all steps of the
    run, including the steps before the checkpoint it resumes from. Construction is collective.

    Attributes:
        restored: the checkpoint that `resume` restored, or None.
    """

    def __init__(self, args: TrainerArgs, state: TrainingState, vote: StepVote, num_steps: int) -> None:
        self._state = state
        self._vote = vote
        self._interval = args.ckpt_save_interval
        if self._interval > num_steps:
            warn_once(
                f"TrainerArgs.ckpt_save_interval = {self._interval} is beyond the run's {num_steps} steps: "
                f"no checkpoint is written to {args.ckpt_save_dir}, and none is read from it"
            )
        saves = args.saves_within(num_steps)
        self._saves = Checkpoints(Path(args.ckpt_save_dir), args.ckpt_keep) if saves else None
        self._loads = Checkpoints(Path(args.ckpt_load_dir)) if args.ckpt_load_dir else None
        self._metric, self._patience = args.best_metric, args.early_stop_patience
        self._best = Checkpoints(Path(args.ckpt_save_dir) / "best", keep=1) if args.best_metric else None
        self._last_saved = 0
        self._stall_seconds = 0.0  # of the last save
        self.restored: Path | None = None

    def resume(self) -> None:
        """Restores the newest intact checkpoint of `ckpt_save_dir`, else of `ckpt_load_dir`. Collective.

        Raises:
            ValueError: the checkpoint belongs to another training, or a folder has only damaged ones.
            FileNotFoundError: `ckpt_load_dir` is set, and neither folder has a checkpoint.
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
                for change in self._state.restore(checkpoints, newest):
                    warn_once(f"training goes on with {change}")
                self.restored = newest
                self._last_saved = step_of(newest)
                return
        if self._loads is not None:
            raise FileNotFoundError(f"TrainerArgs.ckpt_load_dir = {self._loads.path}: there is no checkpoint")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While active, SIGTERM to any rank makes all ranks write a checkpoint and stop.

        If a non-finite loss ends training, first finishes the checkpoint being written, which is from before
        that loss.
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
                except Exception as write_error:
                    error.add_note(
                        f"the checkpoint of step {self._last_saved} was not written: {write_error}"
                    )
                raise

    def after_evaluation(self, figures: dict[str, float], record: RunRecord) -> bool:
        """Saves a checkpoint if it is the best so far, and returns whether to stop early. Collective.

        Raises:
            ValueError: evaluations have no metric of the name `TrainerArgs.best_metric`.
            NonFiniteLossError: a loss so far was not finite. No checkpoint is saved then.
        """
        if self._best is None:
            return False
        if self._metric not in figures:
            raise ValueError(
                f"TrainerArgs.best_metric = {self._metric!r}: evaluations have {sorted(figures)}"
            )
        progress = self._state.progress = self._state.progress.after_evaluation(figures[self._metric])
        if not progress.evaluations_since_best:
            self._vote.finish()
            if self._saves is not None:
                self._finish_writing(self._saves, record)
            self._best.save(progress.step, self._state.to_save(), self._state.settings_to_save())
            try:
                self._best.finish()
            except Exception as error:  # such as a full disk: training is worth more than this checkpoint
                if dist.get_rank() == 0:
                    logger.warning(f"the best checkpoint, of step {progress.step}, was not written: {error}")
        return self.stops_early

    @property
    def stops_early(self) -> bool:
        """Whether as many evaluations as `TrainerArgs.early_stop_patience` have not been the best."""
        return self._patience is not None and self._state.progress.evaluations_since_best >= self._patience

    def after_step(self, requested: bool, is_last: bool, record: RunRecord) -> bool:
        """Saves a checkpoint if one is due, and returns whether to stop. Collective; call after every step.

        Args:
            requested: whether a rank was asked to stop.
            is_last: whether this is the last step.
            record: log that gets the time that a checkpoint stalled training, and the time that writing took.

        Raises:
            NonFiniteLossError: a loss so far was not finite. No checkpoint is saved then.
        """
        if self._saves is None:
            return False
        step = self._state.progress.step
        if requested or is_last or step - self._last_saved >= self._interval:
            start = time.perf_counter()
            self._vote.finish()
            self._finish_writing(self._saves, record)
            self._saves.save(step, self._state.to_save(), self._state.settings_to_save())
            self._last_saved, self._stall_seconds = step, time.perf_counter() - start
        if requested or is_last:
            self._finish_writing(self._saves, record, must_be_written=requested, is_last=True)
        return requested

    def _finish_writing(
        self, saves: Checkpoints, record: RunRecord, must_be_written: bool = False, is_last: bool = False
    ) -> None:
        """Waits for the checkpoint being written, and warns if writing fails.

        With `must_be_written`, raises instead: the job would lose all steps since the previous checkpoint.
        """
        try:
            writing_seconds = saves.finish()
        except Exception as error:  # such as a full disk: training is worth more than this checkpoint
            if must_be_written:
                raise
            if dist.get_rank() == 0:
                logger.warning(
                    f"the checkpoint of step {self._last_saved} was not written: {error}; "
                    f"{'the trained model is not saved' if is_last else 'training goes on'}, and an earlier "
                    "checkpoint stays, if there is one"
                )
            return
        if writing_seconds is not None:
            if (is_last or must_be_written) and dist.get_rank() == 0:
                print(f"the checkpoint of step {self._last_saved} is in {saves.path.resolve()}", flush=True)
            figures = {"stall_ms": self._stall_seconds * 1e3, "writing_ms": writing_seconds * 1e3}
            record.write("checkpoint", self._last_saved, figures)
