"""Trains in one process by a loop of a few lines, without the stage, its pipelines and its loss scale."""

from collections.abc import Iterator
from itertools import chain, count, islice
from pkgutil import resolve_name

import gin
import torch

from commons.datasets.gin_values import from_gin
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, shard_model
from tests.e2e.kept_ranks import working_in


def epoch_batches(task: TrainingTask, epoch: int) -> Iterator[BaseBatch]:
    """Yields an epoch's batches."""
    task.train_dataset.set_epoch(epoch)
    yield from task.train_dataset


def train(task: TrainingTask, trainer: TrainerArgs, device: torch.device) -> list[float]:
    """Trains on the mean loss of each step's loss tokens; returns these means."""
    model, optimizer = shard_model(task.model, from_gin(OptimizerArgs), device)
    model.train()
    losses = []
    batches = chain.from_iterable(epoch_batches(task, epoch) for epoch in count())
    for batch in islice(batches, trainer.max_train_iters):
        optimizer.zero_grad()
        loss_sum, _ = model(batch)
        loss = loss_sum / int(batch.num_loss_tokens().sum())
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def plain_losses(directory: str, task_name: str, gin_file: str, *bindings: str) -> list[float]:
    """Returns each step's loss of a task, named as `module:function`, on one rank."""
    make_task = resolve_name(task_name)
    with working_in(directory):
        gin.parse_config_files_and_bindings([gin_file], bindings)
        trainer, device = from_gin(TrainerArgs), torch.device("cpu")
        return train(make_task(trainer, device), trainer, device)
