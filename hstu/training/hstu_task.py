"""Builds the training tasks of the HSTU models from gin configurations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from commons.datasets import (
    BenchmarkDatasetArgs,
    DatasetFactory,
    DynamicEmbeddingArgs,
    HSTUSource,
    RandomSource,
    SequenceDatasetSpec,
    UserSequences,
    UserSequenceSource,
    check_ids,
)
from commons.datasets.gin_values import from_gin, is_bound
from commons.perf_model import HSTUFlops
from commons.training import EvaluationMetrics, TrainerArgs, TrainingTask
from commons.training.run_log import warn_once
from commons.training.training_state import settings_of
from commons.training.training_task import evaluation_dataset, random_sources, rank_datasets
from hstu.batch_shuffler import flops_of_rows  # this import registers "hstu"
from hstu.models.embedding_tables import EmbeddingTable
from hstu.modules.attention_backend import running_backend
from hstu.modules.hstu_config import HSTUConfig, HSTUFeatures
from hstu.training.model_args import DatasetArgs, NetworkArgs, RankingArgs, RetrievalArgs


@dataclass(frozen=True)
class HSTUSources:
    """The samples that a gin file configures.

    Attributes:
        train: training samples.
        evaluation: evaluation samples, with the same features.
        test: samples to evaluate without training, in place of `evaluation`. None means the same.
        shuffle: whether each training epoch has its own order.
    """

    train: HSTUSource
    evaluation: HSTUSource
    shuffle: bool
    test: HSTUSource | None = None


@dataclass(frozen=True)
class ModelParts:
    """Configuration, tables, and features of a model."""

    config: HSTUConfig
    tables: list[EmbeddingTable]
    features: HSTUFeatures


def sources_from_gin(trainer: TrainerArgs, for_retrieval: bool = False) -> HSTUSources:
    """Returns random samples if `BenchmarkDatasetArgs` is configured, else samples from `DatasetArgs`' files.

    Args:
        trainer: settings with the batch sizes and the seed.
        for_retrieval: whether one or two of each user's events are held out, and not a fifth.

    Raises:
        ValueError: settings are missing or contradict each other, or a file is malformed.
        FileNotFoundError: the dataset is not prepared; the message gives the command that prepares it.
    """
    if not is_bound("BenchmarkDatasetArgs.feature_args"):
        return _disk_sources(for_retrieval)
    args = from_gin(BenchmarkDatasetArgs)
    if is_bound("hstu.DatasetArgs.dataset_name"):
        warn_once(
            "DatasetArgs has no effect beside BenchmarkDatasetArgs, whose random samples are trained on"
        )
    train, evaluation = random_sources(partial(RandomSource, args), args.num_generated_batches, trainer)
    return HSTUSources(train, evaluation, shuffle=False)


def _disk_sources(for_retrieval: bool) -> HSTUSources:
    args = from_gin(DatasetArgs)
    if args.num_held_out is not None and not for_retrieval:
        raise ValueError(f"DatasetArgs.num_held_out = {args.num_held_out}: expected None for ranking")
    if not DatasetFactory.is_registered(args.dataset_name):
        raise ValueError(
            f"DatasetArgs.dataset_name = {args.dataset_name!r}: expected one of "
            f"{DatasetFactory.list_available()}"
        )
    path = Path("data") / args.dataset_name if args.dataset_path is None else Path(args.dataset_path)
    sequences = UserSequences.open(path, args.dataset_name)

    def source(split: Literal["train", "validation", "eval"]) -> UserSequenceSource:
        return UserSequenceSource(sequences, split, **args.source_options(for_retrieval))

    if args.num_held_out != 2:
        return HSTUSources(source("train"), source("eval"), args.shuffle)
    return HSTUSources(source("train"), source("validation"), args.shuffle, source("eval"))


def model_parts(spec: SequenceDatasetSpec, network: NetworkArgs, device: torch.device) -> ModelParts:
    """Returns the configuration, tables, and features of a model for samples of this spec.

    Warns once about each setting without effect on this device.
    """
    num_contextual = sum(spec.feature_to_max_seqlen[name] for name in spec.contextual_feature_names)
    max_items = spec.feature_to_max_seqlen[spec.item_feature_name]
    per_item = 1 if spec.action_feature_name is None else 2
    backend = running_backend(network.kernel_backend.lower(), device, network.kv_channels)
    warn_once(
        *network.backend_lines(backend),
        *network.settings_without_effect(),
        *_dynamic_tables(spec),
        *_of_generative_models(),
        *network.shared_positions(num_contextual + per_item * max_items),
    )
    return ModelParts(
        config=network.config(num_contextual, max_items, backend.name),
        tables=[
            EmbeddingTable(
                name=table.table_name,
                feature_names=tuple(table.feature_names),
                num_embeddings=table.item_vocab_size_or_capacity,
                sharded=table.sharding_type == "model_parallel",
                eviction=table.evict_strategy if isinstance(table, DynamicEmbeddingArgs) else None,
            )
            for table in spec.tables
        ],
        features=HSTUFeatures(
            item=spec.item_feature_name,
            action=spec.action_feature_name,
            contextual=spec.contextual_feature_names,
            negatives=spec.negatives_feature_name,
        ),
    )


def hstu_task(
    trainer: TrainerArgs,
    model: nn.Module,
    config: HSTUConfig,
    sources: HSTUSources,
    metrics: EvaluationMetrics,
    *settings: NetworkArgs | RankingArgs | RetrievalArgs,
) -> TrainingTask:
    """Returns the task of training a model on these samples. `settings` are the model's gin settings."""
    flops = HSTUFlops(
        config.num_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.kv_channels,
        config.is_causal,
        config.disable_contextual_mask,
    )
    train_dataset, eval_dataset = rank_datasets(sources.train, sources.evaluation, trainer, sources.shuffle)
    return TrainingTask(
        model=model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        test_dataset=None if sources.test is None else evaluation_dataset(sources.test, trainer),
        metrics=metrics,
        flops=partial(flops_of_rows, flops),
        check_batch=partial(check_ids, spec=sources.train.spec),
        shuffler_name="hstu",
        shuffler_settings={"flops": flops},
        has_cacheable_tables=any(
            table.sharding_type == "model_parallel" and not isinstance(table, DynamicEmbeddingArgs)
            for table in sources.train.spec.tables
        ),
        settings=settings_of(*settings) | {"NetworkArgs.scaling_seqlen": config.scaling_seqlen},
    )


def _dynamic_tables(spec: SequenceDatasetSpec) -> list[str]:
    """Returns one warning about all settings of dynamic tables that have no effect, if there are any."""
    ignored = {
        table.table_name: table.settings_without_effect()
        for table in spec.tables
        if isinstance(table, DynamicEmbeddingArgs)
    }
    named = [f"{', '.join(settings)} of table {name!r}" for name, settings in ignored.items() if settings]
    if not named:
        return []
    return [
        f"DynamicEmbeddingArgs: {'; '.join(named)} without effect: all rows are in the memory of the ranks' "
        "devices, and a hash divides ids among the ranks"
    ]


def _of_generative_models() -> list[str]:
    settings = [f"TrainerArgs.{name}" for name in ("eval_metrics", "top_k_for_generation")]
    return [f"{name} has no effect: it is for generative models" for name in settings if is_bound(name)]
