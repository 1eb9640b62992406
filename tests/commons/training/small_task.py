"""A small HSTU ranking task, and runs of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commons.datasets import BenchmarkDatasetArgs, EmbeddingArgs, FeatureArgs, RandomSource, SequenceDataset
from commons.perf_model import HSTUFlops
from commons.training import EvaluationMetrics, OptimizerArgs, TrainerArgs, TrainingTask, train
from hstu import batch_shuffler  # noqa: F401  registers "hstu"
from hstu.models.ranking import RankingOutput
from tests.hstu.hstu_samples import NUM_CLASSES, VOCABULARY, ranking_model

FLOPS = HSTUFlops(2, 16, 2, 4)
CPU = torch.device("cpu")
ROWS = 4


class CountedLabels(EvaluationMetrics):
    """Counts the labels that an evaluation sees."""

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
        flops=lambda batch: FLOPS.per_sample(batch.num_tokens()),
        shuffler_name="hstu",
        shuffler_settings={"flops": FLOPS},
    )


def small_dataset(num_samples: int, single_rank: bool = False) -> SequenceDataset:
    def table(name: str, rows: int, sharding_type: str) -> EmbeddingArgs:
        return EmbeddingArgs([name], f"{name}_table", rows, sharding_type)

    args = BenchmarkDatasetArgs(
        feature_args=[
            FeatureArgs(["item", "action"], 12, is_jagged=True),
            FeatureArgs(["user"], 1),
            FeatureArgs(["tags"], 3, is_jagged=True),
        ],
        embedding_args=[
            table("item", VOCABULARY, "model_parallel"),
            table("tags", VOCABULARY, "model_parallel"),
            table("user", VOCABULARY, "data_parallel"),
            table("action", NUM_CLASSES, "data_parallel"),
        ],
        item_feature_name="item",
        contextual_feature_names=["user", "tags"],
        action_feature_name="action",
    )
    source, ranks = RandomSource(args, num_samples, 3), (dist.get_rank(), dist.get_world_size())
    return SequenceDataset(source, ROWS, *ranks, single_rank=single_rank)


def small_run(
    log_dir: str, *, optimizer: str = "sgd", dropout: float = 0.0, num_samples: int = 27, **settings: Any
) -> tuple[list[tuple[int, float]], list[dict[str, float]]]:
    """Trains the small task; returns steps and losses of its log on rank 0, and the evaluations."""
    single_rank = settings.get("single_rank_load", False)
    task = small_task(
        ranking_model(hidden_dropout=dropout),
        small_dataset(num_samples, single_rank),
        small_dataset(13, single_rank),
    )
    evaluations = train(task, args_of(log_dir, **settings), OptimizerArgs(optimizer, 0.05), CPU)
    return losses_in(log_dir), evaluations


def args_of(log_dir: str, **settings: Any) -> TrainerArgs:
    return TrainerArgs(ROWS, log_dir=log_dir, **{"log_interval": 1, **settings})


def lines_in(log_dir: str | Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a log."""
    lines = [json.loads(line) for line in (Path(log_dir) / "train.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses_in(log_dir: str) -> list[tuple[int, float]]:
    """Steps and losses of a log; of none, but on rank 0."""
    return [] if dist.get_rank() else [(line["step"], line["loss"]) for line in lines_in(log_dir, "train")]
