"""A rank's part of training and evaluation samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from commons.datasets import SampleSource, SequenceDataset
from commons.training.training_args import TrainerArgs

Source = TypeVar("Source", bound=SampleSource)

# Evaluation samples of a random dataset are other ones than those of training.
_EVAL_SEED_OFFSET = 1


def rank_datasets(
    train_source: SampleSource, eval_source: SampleSource, trainer: TrainerArgs, shuffle: bool
) -> tuple[SequenceDataset, SequenceDataset]:
    """This rank's training and evaluation batches; only those of training are shuffled."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    train, evaluation = (
        SequenceDataset(source, rows, rank, num_ranks, shuffled, trainer.seed, trainer.single_rank_load)
        for source, rows, shuffled in (
            (train_source, trainer.train_batch_size, shuffle),
            (eval_source, trainer.eval_rows, False),
        )
    )
    return train, evaluation


def random_sources(
    make: Callable[[int, int], Source], num_batches: int, trainer: TrainerArgs
) -> tuple[Source, Source]:
    """Training and evaluation samples of a random dataset.

    Args:
        make: from a number of samples and a seed.
        num_batches: of each, per rank and epoch.
        trainer: of it, batch sizes and seed.
    """
    train, evaluation = (
        make(num_batches * rows * dist.get_world_size(), seed)
        for rows, seed in (
            (trainer.train_batch_size, trainer.seed),
            (trainer.eval_rows, trainer.seed + _EVAL_SEED_OFFSET),
        )
    )
    return train, evaluation
