"""The training loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ..balance_meter import BalanceMeter
from ..named_ranges import named_range
from ..sequence_batch import BaseBatch
from .evaluation import Evaluator, evaluation_text
from .hang_watch import HangWatch
from .recovery import Recovery
from .run_lock import locked
from .run_log import FlopsCounter, RunRecord, StepLog, warn_once
from .sharded_model import shard_model
from .step_traces import StepTraces
from .step_vote import StepVote
from .synchronized_gc import SynchronizedGC
from .training_args import LEARNED_COST_FILE, OptimizerArgs, TrainerArgs
from .training_state import SAMPLES, Progress, TrainingState, settings_of, training_batches
from .training_task import TrainingTask

logger = logging.getLogger(__name__)


def train(
    task: TrainingTask, args: TrainerArgs, optimizer_args: OptimizerArgs, device: torch.device
) -> list[dict[str, float]]:
    """Trains and evaluates as the arguments say. Collective over all ranks.

    Returns:
        The metrics of this process's evaluations, in order. The last evaluation is of the trained model,
        unless training was stopped early.

    Raises:
        KeyError: the shuffler is unknown.
        OSError: `log_dir` or `ckpt_save_dir` cannot be written to, or there is no checkpoint to load.
        ValueError: the pipeline is unknown, the training or evaluation set is empty, or the checkpoint to
            resume from is damaged or of a training with other settings.
        RuntimeError: another run writes to `log_dir` or `ckpt_save_dir`.
        NonFiniteLossError: a rank's loss was not finite, usually two steps earlier. All ranks raise it.
    """
    warn_once(*args.settings_without_effect())
    task.check_datasets()
    whole_run = args.max_train_iters or Progress().steps_left(task.train_dataset)
    with locked(args.written_folders(whole_run)), HangWatch(args.log_dir, args.hang_timeout_s) as watch:
        return _Trainer(task, args, optimizer_args, device, watch, whole_run).run()


class _Trainer:
    """One training run. Construction is collective."""

    def __init__(
        self,
        task: TrainingTask,
        args: TrainerArgs,
        optimizer_args: OptimizerArgs,
        device: torch.device,
        watch: HangWatch,
        whole_run: int,
    ) -> None:
        self._task, self._args, self._device, self._watch = task, args, device, watch
        self._prefetches = task.pipeline_name(args, device) == "prefetch"
        self._model, optimizer = shard_model(task.model, optimizer_args, device, cached=self._prefetches)
        task.metrics.bind(self._model)
        # From here on, ranks draw different random numbers, because they need different dropout masks.
        torch.manual_seed(args.seed + dist.get_rank())
        settings = {
            "TrainerArgs.seed": args.seed,
            "DatasetArgs.shuffle": task.train_dataset.shuffle,
            SAMPLES: task.train_dataset.num_samples,
            **settings_of(optimizer_args),
            **task.settings,
        }
        self._state = TrainingState(self._model, optimizer, settings)
        self._vote = StepVote()
        self._recovery = Recovery(args, self._state, self._vote, whole_run)
        self._recovery.resume()
        self._state.progress = self._state.progress.within(task.train_dataset)
        if self._recovery.restored is not None and dist.get_rank() == 0:
            tqdm.write(f"training resumes from {self._recovery.restored}")
        self._first_step = self._state.progress.step
        left = self._state.progress.steps_left(task.train_dataset)
        self._num_steps = args.max_train_iters or self._first_step + left
        shuffler = task.make_shuffler(args, self._vote)
        self._pipeline = task.make_pipeline(args, self._model, optimizer, device, shuffler)
        learned = [extension for extension in shuffler.extensions if extension.name == "learned_costs"]
        self._learned: Any = learned[0] if learned else None
        self._state.follow(self._learned)
        self._counter = FlopsCounter(task.flops)
        self._collector = SynchronizedGC(args.gc_interval)
        self._evaluator = Evaluator(task, args, self._model, optimizer, device, watch, self._collector)
        self._evaluations: list[dict[str, float]] = []

    def run(self) -> list[dict[str, float]]:
        """Trains to the end, or until a rank is asked to stop. Returns the metrics of each evaluation."""
        args, first, num_steps = self._args, self._first_step, self._num_steps
        epochs = training_batches(self._task, self._device, self._state.progress)
        batches = self._counter.watch(islice(epochs, max(num_steps - first, 0)))
        loader = batches
        self._model.train()
        with (
            self._recovery.listening(),
            self._collector,
            StepTraces(args, first, num_steps, self._device) as traces,
            RunRecord(Path(args.log_dir), num_steps, first) as record,
        ):
            meter = BalanceMeter(self._pipeline)
            log = StepLog(record, meter, num_steps, args)
            record.write("start", first, {"ranks": dist.get_world_size(), "settings": asdict(args)})
            if first >= num_steps and dist.get_rank() == 0:  # else exit code 0 suggests that it trained
                logger.warning(
                    f"NOTHING LEFT TO TRAIN: {self._recovery.restored} is of step {first}, and the run ends "
                    f"with step {num_steps}. Its model is evaluated. To train on, raise "
                    "TrainerArgs.max_train_iters; to start over, choose other checkpoint folders"
                )
            if first >= num_steps or self._state.progress.owes_evaluation:
                self._evaluate(first, log, record)
            left = range(0) if self._recovery.stops_early else range(first + 1, num_steps + 1)
            for step in left:
                self._watch.restart()
                traces.before_step(step)
                done = (step - 1) % args.eval_interval  # steps since the last evaluation
                if self._prefetches and (loader is batches or done == 0):
                    # A table hands out prefetched rows in order, so training must have used all of its rows
                    # when an evaluation starts to prefetch.
                    loader = islice(batches, args.eval_interval - done)
                stop_requested = self._step(step, loader, log)
                is_last = step == num_steps
                # The evaluation comes before the checkpoint, because a run that resumes does not repeat it.
                # A stop request may leave no time to evaluate. The resumed run then makes up for it.
                is_due = is_last or step % args.eval_interval == 0
                evaluates = is_due and (is_last or not stop_requested)
                stops_early = evaluates and self._evaluate(step, log, record)
                is_last = is_last or stops_early
                progress = self._state.progress
                self._state.progress = replace(progress, owes_evaluation=is_due and not evaluates)
                self._watch.restart()
                if self._recovery.after_step(stop_requested, is_last, record):
                    record.write("stop", step, {}, f"stopped after step {step}, as SIGTERM requested")
                    break
                if stops_early:
                    best = f"{args.best_metric} was best at {self._state.progress.best:.4f}"
                    record.write("stop", step, {}, f"stopped after step {step}: {best}")
                    break
            self._vote.finish()
        self._watch.restart()
        if self._learned is not None:
            cost = self._learned.cost()
            if cost is None:
                warn_once(f"too few steps to learn costs: no {LEARNED_COST_FILE} was written")
            elif dist.get_rank() == 0:
                try:
                    cost.save(Path(args.log_dir) / LEARNED_COST_FILE)
                except OSError as error:  # such as a full disk, which must not fail training
                    logger.warning(f"{LEARNED_COST_FILE} was not written: {error}")
        self._pipeline.reset()  # steps planned ahead need all ranks, so none may leave earlier
        return self._evaluations

    def _step(self, step: int, loader: Iterator[BaseBatch], log: StepLog) -> bool:
        """Trains one step, and returns whether a rank has been asked to stop."""
        pipeline = self._pipeline
        pipeline.progress(loader)
        self._collector.after_step()
        self._state.progress = self._state.progress.after_step(self._task.train_dataset)
        stop_requested = self._vote.after_step(step, pipeline.loss_sum)
        log.step(step, self._counter.next_step(), stop_requested)
        return stop_requested

    def _evaluate(self, step: int, log: StepLog, record: RunRecord) -> bool:
        """Evaluates the model, and returns whether to stop early."""
        with log.paused(), named_range("## evaluation ##"):
            figures = self._evaluator.evaluate()
        self._evaluations.append(figures)
        record.write("eval", step, figures, evaluation_text(step, figures))
        return self._recovery.after_evaluation(figures, record)
