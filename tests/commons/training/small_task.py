"""A small HSTU ranking task."""

from __future__ import annotations

from torch import nn

from commons.datasets import SequenceDataset
from commons.perf_model import HSTUFlops
from commons.training import EvaluationMetrics, TrainingTask
from hstu import batch_shuffler  # noqa: F401  registers "hstu"

FLOPS = HSTUFlops(2, 16, 2, 4)


def small_task(
    model: nn.Module | None,
    train_dataset: SequenceDataset | None,
    eval_dataset: SequenceDataset | None,
    metrics: EvaluationMetrics | None,
) -> TrainingTask:
    return TrainingTask(
        model=model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        metrics=metrics,
        flops=lambda batch: FLOPS.per_sample(batch.num_tokens()),
        shuffler_name="hstu",
        shuffler_settings={"flops": FLOPS},
    )
