"""A small HSTU ranking task, and runs of it."""

import json
from pathlib import Path
from typing import Any

import gin
import torch
import torch.distributed as dist
from torch import nn

from commons.datasets import (
    BenchmarkDatasetArgs,
    DynamicEmbeddingArgs,
    EmbeddingArgs,
    FeatureArgs,
    RandomDistribution,
    RandomSource,
    SequenceDataset,
)
from commons.datasets.gin_values import from_gin
from commons.perf_model import HSTUFlops
from commons.training import EvaluationMetrics, OptimizerArgs, TrainerArgs, TrainingTask, train
from hstu import batch_shuffler  # noqa: F401  registers "hstu"
from hstu.models import RankingOutput
from tests.hstu.hstu_samples import NUM_CLASSES, VOCABULARY, ranking_model

FLOPS = HSTUFlops(2, 16, 2, 4)
CPU = torch.device("cpu")
ROWS = 4


class CountedLabels(EvaluationMetrics):
    def __init__(self) -> None:
        self._labels = 0

    def update(self, output: RankingOutput) -> None:
        self._labels += len(output.labels)

    def compute(self) -> dict[str, float]:
        labels = torch.tensor(self._labels)
        dist.all_reduce(labels)
        self._labels = 0
        return {"labels": float(labels)}


def small_task(
    model: nn.Module | None = None,
    train_dataset: SequenceDataset | None = None,
    eval_dataset: SequenceDataset | None = None,
) -> TrainingTask:
    return TrainingTask(
        model=model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        metrics=CountedLabels(),
        flops=lambda batch: FLOPS.work(batch.num_tokens()),
        shuffler_name="hstu",
        shuffler_settings={"flops": FLOPS},
    )


def small_dataset(
    num_samples: int, single_rank: bool = False, unbounded_ids: bool = False
) -> SequenceDataset:
    """Random samples; with `unbounded_ids`, those of items and users are far more than their tables' rows."""
    items = RandomDistribution("uniform", low=0, high=100 * VOCABULARY)
    users = RandomDistribution("normal", mean=0, std=2e18)
    id_args = DynamicEmbeddingArgs if unbounded_ids else EmbeddingArgs
    user_sharding = "model_parallel" if unbounded_ids else "data_parallel"
    args = BenchmarkDatasetArgs(
        feature_args=[
            FeatureArgs(["item", "action"], 12, True, value_dists={"item": items} if unbounded_ids else None),
            FeatureArgs(["user"], 1, value_dists={"user": users} if unbounded_ids else None),
            FeatureArgs(["tags"], 3, is_jagged=True),
        ],
        embedding_args=[
            id_args(["item"], "item_table", VOCABULARY, sharding_type="model_parallel"),
            id_args(["user"], "user_table", VOCABULARY, sharding_type=user_sharding),
            EmbeddingArgs(["tags"], "tag_table", VOCABULARY, "model_parallel"),
            EmbeddingArgs(["action"], "action_table", NUM_CLASSES, "data_parallel"),
        ],
        item_feature_name="item",
        contextual_feature_names=["user", "tags"],
        action_feature_name="action",
    )
    source, ranks = RandomSource(args, num_samples, 3), (dist.get_rank(), dist.get_world_size())
    return SequenceDataset(source, ROWS, *ranks, single_rank=single_rank)


def small_run(
    log_dir: str,
    *,
    optimizer: str = "sgd",
    dropout: float = 0.0,
    num_samples: int = 27,
    eviction: str | None = None,
    learning_rate: float = 0.05,
    num_layers: int = 2,
    hidden_size: int = 16,
    **settings: Any,
) -> tuple[list[tuple[int, float]], list[dict[str, float]]]:
    """Trains the small task; returns steps and losses of its log on rank 0, and the evaluations."""
    kind = settings.get("single_rank_load", False), eviction is not None
    task = small_task(
        ranking_model(
            hidden_dropout=dropout, eviction=eviction, num_layers=num_layers, hidden_size=hidden_size
        ),
        small_dataset(num_samples, *kind),
        small_dataset(13, *kind),
    )
    args = TrainerArgs(**{"train_batch_size": ROWS, "log_dir": log_dir, "log_interval": 1, **settings})
    evaluations = train(task, args, OptimizerArgs(optimizer, learning_rate), CPU)
    if dist.get_rank():
        return [], evaluations
    return [(line["step"], line["loss"]) for line in lines_in(log_dir, "train")], evaluations


def trainer_args(lines: list[str]) -> TrainerArgs:
    """The settings of a gin file with these lines."""
    gin.clear_config()
    try:
        gin.parse_config("\n".join(["TrainerArgs.train_batch_size = 32", *lines]))
        return from_gin(TrainerArgs)
    finally:
        gin.clear_config()


def lines_in(log_dir: str | Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a log."""
    lines = [json.loads(line) for line in (Path(log_dir) / "train.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]
