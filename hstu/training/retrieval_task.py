"""Builds a retrieval model and its data from a gin configuration."""

from __future__ import annotations

from dataclasses import replace

import torch

from commons.datasets import RetrievalSource
from commons.datasets.gin_values import from_gin
from commons.training import CatalogueMetrics, TrainerArgs, TrainingTask
from hstu.models.retrieval import HSTURetrieval
from hstu.training.hstu_task import hstu_task, model_parts, sources_from_gin
from hstu.training.model_args import NetworkArgs, RetrievalArgs


def retrieval_task(trainer: TrainerArgs, device: torch.device) -> TrainingTask:
    """Returns the task that the parsed gin configuration describes.

    The data is random if `BenchmarkDatasetArgs` is configured. Otherwise it comes from `DatasetArgs`' files,
    with each user's last item, or last two items, held out for evaluation.

    Raises:
        ValueError: settings are missing or contradict each other.
        FileNotFoundError: the dataset is not prepared; the message gives the command that prepares it.
    """
    network, retrieval = from_gin(NetworkArgs), from_gin(RetrievalArgs)
    histories = sources_from_gin(trainer, for_retrieval=True)
    options = retrieval.num_negatives, trainer.seed, retrieval.use_actions, retrieval.use_contextual_features
    train = RetrievalSource(histories.train, "train", *options)
    evaluation = RetrievalSource(histories.evaluation, "eval", *options)
    test = None if histories.test is None else RetrievalSource(histories.test, "eval", *options)
    spec = train.spec
    parts = model_parts(spec, network, device)
    torch.manual_seed(trainer.seed)
    on_meta = torch.device("meta")  # ranks create only their own rows
    model = HSTURetrieval(parts.config, parts.tables, parts.features, retrieval.config(), on_meta)
    metrics = CatalogueMetrics(
        names=retrieval.eval_metrics,
        setting="RetrievalArgs.eval_metrics",
        table=next(table.name for table in parts.tables if parts.features.item in table.feature_names),
        catalogue=train.catalogue,
        l2_norm_eps=retrieval.l2_norm_eps,
        device=device,
    )
    sources = replace(histories, train=train, evaluation=evaluation, test=test)
    return hstu_task(trainer, model, parts.config, sources, metrics, network, retrieval)
