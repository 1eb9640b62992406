"""The training loop, and the evaluation in its midst."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist

from commons.datasets import SequenceDataset
from commons.named_ranges import named_range
from commons.sequence_batch import BaseBatch
from commons.training.hang_watch import HangWatch
from commons.training.progress import Progress
from commons.training.rank_zero_log import warn_once
from commons.training.recovery import Recovery
from commons.training.sharded_model import shard_model
from commons.training.shared_collection import SharedCollection
from commons.training.step_log import LoadCounter, StepLog
from commons.training.step_traces import StepTraces
from commons.training.training_args import OptimizerArgs, TrainerArgs
from commons.training.training_state import TrainingState
from commons.training.training_task import TrainingTask


def train(
    task: TrainingTask, args: TrainerArgs, optimizer_args: OptimizerArgs, device: torch.device
) -> list[dict[str, float]]:
    """Trains and evaluates as the arguments say. Collective over all ranks.

    Returns:
        The metrics of every evaluation of this process, in order; the last is of the trained model, unless
        training was stopped before, or had nothing left to do.

    Raises:
        KeyError: an unknown pipeline or shuffler.
        ValueError: the training or the evaluation set is empty.
    """
    with HangWatch(args.log_dir, args.hang_timeout_s) as watch:
        return _train(task, args, optimizer_args, device, watch)


def _train(
    task: TrainingTask,
    args: TrainerArgs,
    optimizer_args: OptimizerArgs,
    device: torch.device,
    watch: HangWatch,
) -> list[dict[str, float]]:
    warn_once(args.settings_without_effect())
    for kind, dataset in (("training", task.train_dataset), ("evaluation", task.eval_dataset)):
        if len(dataset) == 0:
            raise ValueError(f"the {kind} set has no samples; check the dataset's settings and files")
    prefetches = task.pipeline_name(args, device) == "prefetch"
    model, optimizer = shard_model(task.model, optimizer_args, device, cached=prefetches)
    task.metrics.bind(model)
    # From here on ranks draw different numbers: equal dropout masks on all would be wrong.
    torch.manual_seed(args.seed + dist.get_rank())
    counter = LoadCounter(task.flops, task.check_batch)
    state = TrainingState(model, optimizer)
    recovery = Recovery(args, state)
    recovery.resume()
    first_step = state.progress.step
    num_steps = args.max_train_iters or first_step + _steps_left(task.train_dataset, state.progress)
    pipeline = task.make_pipeline(args, model, optimizer, device)
    collection = SharedCollection(args.gc_interval)
    evaluator = Evaluator(task, args, model, optimizer, device, watch, collection)
    epochs = _epochs(task.train_dataset, device, state.progress)
    batches = counter.watch(islice(epochs, max(num_steps - first_step, 0)))
    loader: Iterator[BaseBatch] = batches
    evaluations = []
    model.train()
    log_path = Path(args.log_dir) / "train.jsonl"
    with (
        recovery.listening(),
        collection,
        StepTraces(args, first_step, num_steps, device) as traces,
        StepLog(num_steps, args.log_interval, log_path, first_step) as log,
    ):
        log.write("start", {"ranks": dist.get_world_size(), "settings": asdict(args)})
        for step in range(first_step + 1, num_steps + 1):
            watch.begins(f"step {step}")
            traces.before_step(step)
            if prefetches and (loader is batches or step % args.eval_interval == 1 % args.eval_interval):
                # A table hands out what was prefetched in its order: none of training's may be left when
                # evaluation begins to prefetch.
                loader = islice(batches, args.eval_interval - (step - 1) % args.eval_interval)
            output = pipeline.progress(loader)
            collection.after_step()
            state.progress = state.progress.after_step(task.train_dataset)
            log.step(output, pipeline.report, *counter.next_step())
            # Before the checkpoint: what goes on from there does not come back to this evaluation.
            if step % args.eval_interval == 0 or step == num_steps:
                log.pause()
                with named_range("## evaluation ##"):
                    figures = evaluator.evaluate()
                evaluations.append(figures)
                text = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
                log.write("eval", figures, f"step {step}  evaluation: {text}")
                log.resume()
            watch.begins(f"the checkpoint of step {step}")
            if recovery.after_step(is_last=step == num_steps):
                log.write("stop", {}, f"stopped behind step {step}, as SIGTERM asked for")
                break
    watch.begins("the end")
    pipeline.reset()  # what is planned ahead needs the other ranks; none may leave before
    return evaluations


class Evaluator:
    """Evaluates a model in training through a pipeline of its own.

    The training pipeline keeps its batches in flight meanwhile; handing it the evaluation batches would run
    those in evaluation mode.
    """

    def __init__(
        self,
        task: TrainingTask,
        args: TrainerArgs,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        watch: HangWatch,
        collection: SharedCollection,
    ) -> None:
        self._task = task
        self._max_iters = args.max_eval_iters
        self._in_micro_batches = args.max_tokens_per_micro_batch is not None
        self._model = model
        self._device = device
        self._watch = watch
        self._collection = collection
        self._pipeline = task.make_pipeline(args, model, optimizer, device)

    def evaluate(self) -> dict[str, float]:
        """The metrics over the evaluation set. Collective over all ranks."""
        batches = map(self._checked, islice(_on_host(self._task.eval_dataset, self._device), self._max_iters))
        self._model.eval()
        with torch.no_grad():
            for number in count(1):
                self._watch.begins(f"batch {number} of an evaluation")
                try:
                    _, _, output = self._pipeline.progress(batches)
                except StopIteration:
                    break
                for of_part in output if self._in_micro_batches else [output]:
                    self._task.metrics.update(of_part)
                self._collection.after_step()
        self._watch.begins("the metrics of an evaluation")
        self._model.train()
        return self._task.metrics.compute()

    def _checked(self, batch: BaseBatch) -> BaseBatch:
        self._task.check_batch(batch)
        return batch


def _epochs(dataset: SequenceDataset, device: torch.device, progress: Progress) -> Iterator[BaseBatch]:
    """Batches of one epoch after the other from where training has come to, without end."""
    epoch, sample = progress.epoch, progress.sample
    while dataset.loads_here:
        dataset.set_epoch(epoch, sample)
        yield from _on_host(dataset, device)
        epoch, sample = epoch + 1, 0


def _steps_left(dataset: SequenceDataset, progress: Progress) -> int:
    """Of the first epoch."""
    if progress.epoch:
        return 0
    return -(-(dataset.num_samples - progress.sample) // dataset.samples_per_step)


def _on_host(dataset: SequenceDataset, device: torch.device) -> Iterator[BaseBatch]:
    """The dataset's batches, in pinned memory if they go to a GPU."""
    return (batch.pin_memory() for batch in dataset) if device.type == "cuda" else iter(dataset)
