"""Pipelines of a small ranking model with sharded tables, and batches that it trains on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from commons.datasets import HSTUBatch
from commons.distributed import BatchShuffler
from commons.pipeline import TrainPipelineFactory
from commons.training import OptimizerArgs, shard_model
from tests.commons.distributed.shufflers import FieldShuffler
from tests.hstu.hstu_samples import VOCABULARY, Sample, hstu_batch, ranking_model

CPU = torch.device("cpu")


class TokenShuffler(FieldShuffler):
    """The workload is the square of the tokens."""

    def get_workloads(self, batch):
        return batch.num_tokens() ** 2

    def prefix_cost(self, tokens, counts):
        return tokens**2


def sharded_ranking_model(learning_rate: float = 0.01) -> tuple[Any, Any]:
    """Returns the model and its optimizer. Collective over all ranks."""
    return shard_model(ranking_model(num_layers=1), OptimizerArgs("sgd", learning_rate), CPU)


def pipeline_of(
    name: str, model: torch.nn.Module, optimizer: Any, shuffler: BatchShuffler, reduction: str = "sum", **more
) -> Any:
    return TrainPipelineFactory.create(
        name,
        model=model,
        optimizer=optimizer,
        device=CPU.type,  # a name will do
        batch_shuffler=shuffler,
        loss_reduction=reduction,
        **more,
    )


def ranking_pipeline(name: str, shuffler: BatchShuffler) -> Any:
    return pipeline_of(name, *sharded_ranking_model(), shuffler)


def steps_of(pipeline: Any, batches: Iterable[Any]) -> Iterator[tuple[torch.Tensor, int, Any]]:
    """Runs the steps of a loader until it has ended on all ranks."""
    loader = iter(batches)
    while True:
        try:
            yield pipeline.progress(loader)
        except StopIteration:
            return


def draw_histories(rng: np.random.Generator, rows: int) -> HSTUBatch:
    """Draws a batch with a label for each item; four in ten batches have padding rows."""
    num_real = int(rng.integers(0, rows + 1)) if rng.random() < 0.4 else rows

    def sample() -> Sample:
        items = rng.integers(0, VOCABULARY, min(int(rng.lognormal(1.5, 1.0)), 30)).tolist()
        actions = [item % 5 for item in items]
        return Sample([int(rng.integers(0, VOCABULARY))], [], items, actions, 0, actions)

    empty = Sample([], [], [], [], 0, [])
    batch = hstu_batch([sample() for _ in range(num_real)] + [empty] * (rows - num_real))
    batch.actual_batch_size = num_real
    return batch


def equal_histories(rows: int, items: int) -> HSTUBatch:
    """Makes a batch whose samples all have so many items, each with a label."""
    return hstu_batch([Sample([1], [], [1] * items, [1] * items, 0, [1] * items)] * rows)


def contents(batch: HSTUBatch) -> list[tuple]:
    """Returns for each sample its user, items, actions and labels."""
    of_features = batch.features.to_dict()
    columns = [of_features[key].to_dense() for key in ("user", "item", "action")]
    columns.append(batch.labels["label"].to_dense())
    return [tuple(tuple(column[row].tolist()) for column in columns) for row in range(batch.num_samples)]


def num_tokens(sample: tuple) -> int:
    """Tokens of a sample as `contents` returns it."""
    user, items, actions, _ = sample
    return len(user) + len(items) + len(actions)
