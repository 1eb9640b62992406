"""The evaluation in the midst of training."""

from __future__ import annotations

from itertools import count, islice

import torch

from commons.sequence_batch import BaseBatch
from commons.training.hang_watch import HangWatch
from commons.training.shared_collection import SharedCollection
from commons.training.training_args import TrainerArgs
from commons.training.training_batches import on_host
from commons.training.training_task import TrainingTask


def evaluation_text(step: int, figures: dict[str, float]) -> str:
    """The line that shows an evaluation."""
    return f"step {step}  evaluation: " + "  ".join(f"{name} {value:.4f}" for name, value in figures.items())


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
        batches = map(self._checked, islice(on_host(self._task.eval_dataset, self._device), self._max_iters))
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
