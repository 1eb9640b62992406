"""Evaluation during training, or of a checkpoint without training."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from .balance_flags import FLOPS, LEARNED
from .hang_watch import HangWatch
from .recovery import Recovery
from .run_lock import locked
from .run_log import RunRecord, warn_once
from .sharded_model import shard_model
from .step_vote import StepVote
from .synchronized_gc import SynchronizedGC
from .training_args import OptimizerArgs, TrainerArgs
from .training_state import TrainingState, host_batches
from .training_task import TrainingTask


def evaluation_text(step: int, figures: dict[str, float]) -> str:
    """Returns the log line of an evaluation."""
    return f"step {step}  evaluation: " + "  ".join(f"{name} {value:.4f}" for name, value in figures.items())


class Evaluator:
    """Evaluates a model through a separate pipeline.

    The training pipeline has training batches in flight, and would run them in evaluation mode.
    """

    def __init__(
        self,
        task: TrainingTask,
        args: TrainerArgs,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        watch: HangWatch,
        collector: SynchronizedGC,
    ) -> None:
        self._task = task
        self._max_iters = args.max_eval_iters
        self._in_micro_batches = args.max_tokens_per_micro_batch is not None
        self._model = model
        self._device = device
        self._watch = watch
        self._collector = collector
        if args.balance_cost == LEARNED:  # an evaluation has no backward to measure
            args = replace(args, balance_cost=FLOPS, balance_speed_limit=TrainerArgs.balance_speed_limit)
        self._pipeline = task.make_pipeline(args, model, optimizer, device)

    def evaluate(self) -> dict[str, float]:
        """Returns the metrics over the evaluation set. Collective over all ranks."""
        batches = islice(host_batches(self._task, self._task.eval_dataset, self._device), self._max_iters)
        self._model.eval()
        with torch.no_grad():
            while True:
                self._watch.restart()
                try:
                    output = self._pipeline.progress(batches)
                except StopIteration:
                    break
                for part in output if self._in_micro_batches else [output]:
                    self._task.metrics.update(part)
                self._collector.after_step()
        self._watch.restart()
        self._model.train()
        return self._task.metrics.compute()


def evaluate_checkpoint(task: TrainingTask, args: TrainerArgs, device: torch.device) -> dict[str, float]:
    """Evaluates the newest intact checkpoint of `ckpt_load_dir`, whatever optimizer trained it. Collective.

    Raises:
        FileNotFoundError: `ckpt_load_dir` has no checkpoint.
        OSError: `log_dir` cannot be written to.
        ValueError: the checkpoint is damaged or of another model, or the training or evaluation set is empty.
        RuntimeError: another run writes to `log_dir`.
    """
    warn_once(*args.settings_without_effect())
    task.check_datasets()
    with (
        locked(args.written_folders(num_steps=0)),
        HangWatch(args.log_dir, args.hang_timeout_s) as watch,
    ):
        cached = task.pipeline_name(args, device) == "prefetch"
        # Sharding requires an optimizer. SGD is one without state.
        model, optimizer = shard_model(task.model, OptimizerArgs("sgd", 0.0), device, cached=cached)
        task.metrics.bind(model)
        state = TrainingState(model, optimizer=None, settings=task.settings)
        recovery = Recovery(replace(args, ckpt_save_interval=-1), state, StepVote(), num_steps=0)
        recovery.resume()
        if dist.get_rank() == 0:
            tqdm.write(f"no training: evaluates {recovery.restored}")
        step = state.progress.step
        with (
            RunRecord(Path(args.log_dir), step, step) as record,
            SynchronizedGC(args.gc_interval) as collector,
        ):
            tested = replace(task, eval_dataset=task.test_dataset or task.eval_dataset)
            figures = Evaluator(tested, args, model, optimizer, device, watch, collector).evaluate()
            record.write("eval", step, figures, evaluation_text(step, figures))
    return figures
