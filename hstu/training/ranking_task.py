"""Builds a ranking model and its data from a gin configuration."""

from __future__ import annotations

import math

import torch

from commons.datasets import SequenceDatasetSpec
from commons.datasets.gin_values import from_gin
from commons.training import RankingMetrics, TrainerArgs, TrainingTask
from hstu.models.ranking import HSTURanking
from hstu.training.hstu_task import hstu_task, model_parts, sources_from_gin
from hstu.training.model_args import NetworkArgs, RankingArgs


def ranking_task(trainer: TrainerArgs, device: torch.device) -> TrainingTask:
    """Returns the task that the parsed gin configuration describes.

    The data is random if `BenchmarkDatasetArgs` is configured; otherwise it comes from `DatasetArgs`' files.

    Raises:
        ValueError: settings are missing or contradict each other.
        FileNotFoundError: the dataset is not prepared; the message gives the command that prepares it.
    """
    network, ranking = from_gin(NetworkArgs), from_gin(RankingArgs)
    sources = sources_from_gin(trainer)
    spec = sources.train.spec
    _check_head(ranking, spec)
    parts = model_parts(spec, network, device)
    torch.manual_seed(trainer.seed)
    on_meta = torch.device("meta")  # ranks create only their own rows
    model = HSTURanking(parts.config, parts.tables, parts.features, ranking.config(), on_meta)
    metrics = RankingMetrics(ranking.num_tasks, _positive_class(spec, ranking), device)
    return hstu_task(trainer, model, parts.config, sources, metrics, network, ranking)


def _check_head(ranking: RankingArgs, spec: SequenceDatasetSpec) -> None:
    arch = ranking.prediction_head_arch
    if spec.num_tasks > 1 and not ranking.num_tasks == arch[-1] == spec.num_tasks:
        raise ValueError(
            f"RankingArgs.num_tasks = {ranking.num_tasks}, prediction_head_arch = {arch}: the dataset has "
            f"{spec.num_tasks} tasks, expected num_tasks = {spec.num_tasks}, and a last width of "
            f"{spec.num_tasks}"
        )
    if ranking.num_tasks < arch[-1] < spec.num_classes:
        raise ValueError(
            f"RankingArgs.prediction_head_arch = {arch}: the last width is the "
            f"number of classes, expected at least the dataset's {spec.num_classes}"
        )
    if arch[-1] == ranking.num_tasks and 2**ranking.num_tasks < spec.num_classes:
        raise ValueError(
            f"RankingArgs.num_tasks = {ranking.num_tasks}, prediction_head_arch = {arch}: a last width of "
            f"num_tasks is for binary tasks, and the dataset has {spec.num_classes} classes; expected at "
            f"least {spec.num_classes} as the last width"
        )


def _positive_class(spec: SequenceDatasetSpec, ranking: RankingArgs) -> int:
    """Returns the first positive class. The default is four fifths of the way up, like 4 of 5 stars."""
    if spec.positive_class is not None:
        return spec.positive_class
    return math.ceil(0.8 * ranking.prediction_head_arch[-1]) - 1
