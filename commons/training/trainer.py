"""The training loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from commons.named_ranges import named_range
from commons.sequence_batch import BaseBatch
from commons.training.compute_clock import ComputeClock
from commons.training.evaluator import Evaluator, evaluation_text
from commons.training.hang_watch import HangWatch
from commons.training.progress import Progress
from commons.training.rank_zero_log import warn_once
from commons.training.recovery import Recovery
from commons.training.run_record import RunRecord
from commons.training.sharded_model import shard_model
from commons.training.shared_collection import SharedCollection
from commons.training.step_log import LoadCounter, StepLog
from commons.training.step_traces import StepTraces
from commons.training.step_vote import StepVote
from commons.training.training_args import OptimizerArgs, TrainerArgs
from commons.training.training_batches import steps_left, training_batches
from commons.training.training_state import TrainingState
from commons.training.training_task import TrainingTask

logger = logging.getLogger(__name__)


def train(
    task: TrainingTask, args: TrainerArgs, optimizer_args: OptimizerArgs, device: torch.device
) -> list[dict[str, float]]:
    """Trains and evaluates as the arguments say. Collective over all ranks.

    Returns:
        The metrics of every evaluation of this process, in order; the last is of the trained model, unless
        training was stopped before.

    Raises:
        KeyError: an unknown pipeline or shuffler.
        ValueError: the training or the evaluation set is empty.
        NonFiniteLossError: a loss was not finite on some rank, in the step before; on all of them.
    """
    warn_once(args.settings_without_effect())
    task.check_datasets()
    with HangWatch(args.log_dir, args.hang_timeout_s) as watch:
        return _Training(task, args, optimizer_args, device, watch).run()


class _Training:
    """One run, from what is to be trained to the metrics of its evaluations. Made collectively."""

    def __init__(
        self,
        task: TrainingTask,
        args: TrainerArgs,
        optimizer_args: OptimizerArgs,
        device: torch.device,
        watch: HangWatch,
    ) -> None:
        self._args, self._device, self._watch = args, device, watch
        self._dataset = task.train_dataset
        self._prefetches = task.pipeline_name(args, device) == "prefetch"
        self._model, optimizer = shard_model(task.model, optimizer_args, device, cached=self._prefetches)
        task.metrics.bind(self._model)
        # From here on ranks draw different numbers: equal dropout masks on all would be wrong.
        torch.manual_seed(args.seed + dist.get_rank())
        self._counter = LoadCounter(task.flops, task.check_batch)
        self._state = TrainingState(self._model, optimizer)
        self._vote = StepVote(device)
        whole_run = args.max_train_iters or steps_left(self._dataset, Progress())
        self._recovery = Recovery(args, self._state, self._vote, whole_run)
        self._recovery.resume()
        if self._recovery.restored is not None and dist.get_rank() == 0:
            tqdm.write(f"training goes on from {self._recovery.restored}")
        self._first_step = self._state.progress.step
        left = steps_left(self._dataset, self._state.progress)
        self._num_steps = args.max_train_iters or self._first_step + left
        self._pipeline = task.make_pipeline(args, self._model, optimizer, device)
        self._clock = ComputeClock(self._model, device)
        self._collection = SharedCollection(args.gc_interval)
        self._evaluator = Evaluator(task, args, self._model, optimizer, device, watch, self._collection)
        self._evaluations: list[dict[str, float]] = []

    def run(self) -> list[dict[str, float]]:
        """Trains to the end, or until a rank is asked to stop; the metrics of each evaluation."""
        args, first, num_steps = self._args, self._first_step, self._num_steps
        epochs = training_batches(self._dataset, self._device, self._state.progress)
        batches = self._counter.watch(islice(epochs, max(num_steps - first, 0)))
        loader = batches
        self._model.train()
        with (
            self._recovery.listening(),
            self._collection,
            StepTraces(args, first, num_steps, self._device) as traces,
            RunRecord(Path(args.log_dir), num_steps, first) as record,
        ):
            log = StepLog(record, num_steps, args.log_interval, first, args.peak_flops)
            log.write("start", {"ranks": dist.get_world_size(), "settings": asdict(args)})
            if first >= num_steps:
                self._warn_of_no_step()
                self._evaluate(first, log)
            for step in range(first + 1, num_steps + 1):
                self._watch.begins(f"step {step}")
                traces.before_step(step)
                if self._prefetches and (loader is batches or self._begins_interval(step)):
                    # A table hands out what was prefetched in its order: none of training's may be left when
                    # evaluation begins to prefetch.
                    loader = islice(batches, args.eval_interval - (step - 1) % args.eval_interval)
                requested = self._step(step, loader, log)
                is_last = step == num_steps
                # Before the checkpoint: what goes on from there does not come back to this evaluation.
                # But who asks for an end may not have the time for one.
                if is_last or (step % args.eval_interval == 0 and not requested):
                    self._evaluate(step, log)
                self._watch.begins(f"the checkpoint of step {step}")
                if self._recovery.after_step(requested, is_last, log):
                    log.write("stop", {}, f"stopped behind step {step}, as SIGTERM asked for")
                    break
            self._vote.finish()
        self._watch.begins("the end")
        self._pipeline.reset()  # what is planned ahead needs the other ranks; none may leave before
        return self._evaluations

    def _warn_of_no_step(self) -> None:
        """Rank 0 says why nothing is trained: a run that only exits with 0 looks like one that trained."""
        if dist.get_rank():
            return
        logger.warning(
            f"NOTHING LEFT TO TRAIN: {self._recovery.restored} is of step {self._first_step}, and the run "
            f"ends with step {self._num_steps}. Its model is evaluated. To go on from it raise "
            "TrainerArgs.max_train_iters; to begin anew name other folders for checkpoints"
        )

    def _begins_interval(self, step: int) -> bool:
        return step % self._args.eval_interval == 1 % self._args.eval_interval

    def _step(self, step: int, loader: Iterator[BaseBatch], log: StepLog) -> bool:
        """Trains one step; whether a rank has been asked to stop."""
        pipeline = self._pipeline
        self._clock.begin()
        output = pipeline.progress(loader)
        self._collection.after_step()
        self._state.progress = self._state.progress.after_step(self._dataset)
        requested = self._vote.after_step(step, output[0])
        computed = self._clock.span(), pipeline.computed_tokens
        log.step(output, pipeline.report, *computed, *self._counter.next_step())
        return requested

    def _evaluate(self, step: int, log: StepLog) -> None:
        log.pause()
        with named_range("## evaluation ##"):
            figures = self._evaluator.evaluate()
        self._evaluations.append(figures)
        log.write("eval", figures, evaluation_text(step, figures))
        log.resume()
