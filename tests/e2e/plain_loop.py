"""Trains in one process by a loop of a few lines, without the stage, its pipelines and its loss scale.

python -m tests.e2e.plain_loop TASK GIN_FILE LOSSES BINDING ...

TASK makes the task, as in hstu.training.ranking_task:ranking_task. LOSSES gets each step's loss, as JSON.
"""

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import sys
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from pkgutil import resolve_name

import gin
import torch

from commons.gin_values import from_gin
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, rank_process, run_rank
from commons.training.sharded_model import shard_model


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


def main() -> None:
    task_name, gin_file, losses_file, *bindings = sys.argv[1:]
    make_task = resolve_name(task_name)
    gin.parse_config_files_and_bindings([gin_file], bindings)
    trainer = from_gin(TrainerArgs)
    with rank_process() as device:
        losses = train(make_task(trainer, device), trainer, device)
    Path(losses_file).write_text(json.dumps(losses))


if __name__ == "__main__":
    run_rank(main)
