"""A ranking model and its data, put together as a gin file says."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch

import hstu.batch_shuffler  # noqa: F401  registers "hstu"
from commons.datasets import (
    BenchmarkDatasetArgs,
    DynamicEmbeddingArgs,
    HSTUBatch,
    HSTUSource,
    RandomSource,
    SequenceDatasetSpec,
    UserSequences,
    UserSequenceSource,
    check_ids,
)
from commons.datasets.user_sequences import PREPROCESSORS
from commons.gin_values import from_gin, is_bound
from commons.perf_model import HSTUFlops
from commons.training import RankingMetrics, TrainerArgs, TrainingTask
from commons.training.rank_datasets import random_sources, rank_datasets
from commons.training.rank_zero_log import warn_once
from hstu.models.embedding_tables import EmbeddingTable
from hstu.models.hstu_encoder import HSTUFeatures
from hstu.models.ranking import HSTURanking
from hstu.training.model_args import DatasetArgs, NetworkArgs, RankingArgs


def ranking_task(trainer: TrainerArgs, device: torch.device) -> TrainingTask:
    """The task that the parsed gin configuration describes.

    With `BenchmarkDatasetArgs` configured the data is random, else it comes from the files of `DatasetArgs`.

    Raises:
        ValueError: settings are missing or contradict each other.
        FileNotFoundError: the dataset is not prepared; the message has the command that does it.
    """
    network, ranking = from_gin(NetworkArgs), from_gin(RankingArgs)
    train_source, eval_source, shuffle = (
        _random_sources(trainer) if is_bound("BenchmarkDatasetArgs.feature_args") else _disk_sources()
    )
    spec = train_source.spec
    _check_head(ranking, spec)
    warn_once(network.settings_without_effect() + _dynamic_tables(spec) + _of_generative_models())
    num_contextual = sum(spec.feature_to_max_seqlen[name] for name in spec.contextual_feature_names)
    config = network.config(num_contextual, spec.feature_to_max_seqlen[spec.item_feature_name])
    torch.manual_seed(trainer.seed)
    model = HSTURanking(config, _tables(spec), _features(spec), ranking.config())
    flops = HSTUFlops(config.num_layers, config.hidden_size, config.num_heads, config.head_dim)
    train_dataset, eval_dataset = rank_datasets(train_source, eval_source, trainer, shuffle)
    return TrainingTask(
        model=model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        metrics=RankingMetrics(ranking.num_tasks, _positive_class(spec, ranking), device),
        flops=partial(_flops_of_rows, flops),
        check_batch=partial(check_ids, spec=spec),
        shuffler_name="hstu",
        shuffler_settings={"flops": flops},
    )


def _random_sources(trainer: TrainerArgs) -> tuple[HSTUSource, HSTUSource, bool]:
    """Training and evaluation samples, and whether each epoch has an order of its own."""
    args = from_gin(BenchmarkDatasetArgs)
    train, evaluation = random_sources(partial(RandomSource, args), args.num_generated_batches, trainer)
    return train, evaluation, False


def _disk_sources() -> tuple[HSTUSource, HSTUSource, bool]:
    """Training and evaluation samples, and whether each epoch has an order of its own."""
    args = from_gin(DatasetArgs)
    if args.dataset_name not in PREPROCESSORS:
        raise ValueError(
            f"DatasetArgs.dataset_name = {args.dataset_name!r}: expected one of {sorted(PREPROCESSORS)}"
        )
    path = Path("data") / args.dataset_name if args.dataset_path is None else Path(args.dataset_path)
    sequences = UserSequences.open(path, args.dataset_name)
    train = UserSequenceSource(sequences, "train", args.max_history_seqlen, args.max_num_candidates)
    evaluation = UserSequenceSource(sequences, "eval", args.max_history_seqlen, args.max_num_candidates)
    return train, evaluation, args.shuffle


def _check_head(ranking: RankingArgs, spec: SequenceDatasetSpec) -> None:
    arch = ranking.prediction_head_arch
    if spec.num_tasks > 1 and not ranking.num_tasks == arch[-1] == spec.num_tasks:
        raise ValueError(
            f"RankingArgs.num_tasks = {ranking.num_tasks}, prediction_head_arch = {arch}: the dataset has "
            f"{spec.num_tasks} tasks, expected num_tasks = {spec.num_tasks} and this as the last width"
        )
    if ranking.num_tasks < arch[-1] < spec.num_classes:
        raise ValueError(
            f"RankingArgs.prediction_head_arch = {arch}: the last width is the "
            f"number of classes, expected at least the dataset's {spec.num_classes}"
        )


def _tables(spec: SequenceDatasetSpec) -> list[EmbeddingTable]:
    return [
        EmbeddingTable(
            name=table.table_name,
            feature_names=tuple(table.feature_names),
            num_embeddings=table.item_vocab_size_or_capacity,
            sharded=table.sharding_type == "model_parallel",
        )
        for table in spec.tables
    ]


def _features(spec: SequenceDatasetSpec) -> HSTUFeatures:
    return HSTUFeatures(
        item=spec.item_feature_name,
        action=spec.action_feature_name,
        contextual=spec.contextual_feature_names,
    )


def _positive_class(spec: SequenceDatasetSpec, ranking: RankingArgs) -> int:
    """The first positive class; where the data does not say, the top fifth, as four stars of five are."""
    if spec.positive_class is not None:
        return spec.positive_class
    return math.ceil(0.8 * ranking.prediction_head_arch[-1]) - 1


def _flops_of_rows(flops: HSTUFlops, batch: HSTUBatch) -> torch.Tensor:
    return flops.per_sample(batch.num_tokens())


def _dynamic_tables(spec: SequenceDatasetSpec) -> list[str]:
    names = [table.table_name for table in spec.tables if isinstance(table, DynamicEmbeddingArgs)]
    if not names:
        return []
    return [f"DynamicEmbeddingArgs: tables {names} run as row-wise sharded tables of their full capacity"]


def _of_generative_models() -> list[str]:
    settings = [f"TrainerArgs.{name}" for name in ("eval_metrics", "top_k_for_generation")]
    return [f"{name} has no effect: it is of generative models" for name in settings if is_bound(name)]
