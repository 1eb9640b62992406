"""Builds the SID-GR model and its data from a gin configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import sid_gr.batch_shuffler  # noqa: F401  registers "sid_gr"
from commons.datasets import (
    ItemSIDs,
    RandomSIDSource,
    SIDBatch,
    SIDSequenceSource,
    SIDSource,
    random_item_sids,
)
from commons.datasets.gin_values import from_gin
from commons.perf_model import TransformerConfig, transformer_work
from commons.training import RetrievalMetrics, TrainerArgs, TrainingTask
from commons.training.run_log import warn_once
from commons.training.training_state import settings_of
from commons.training.training_task import evaluation_dataset, random_sources, rank_datasets
from sid_gr.models import SIDGR, CodeTree, SIDGRConfig
from sid_gr.modules import DecoderConfig
from sid_gr.training.model_args import RANDOM, DatasetArgs, NetworkArgs

# Items of a random dataset, or fewer if the codebooks do not have that many tuples.
_NUM_RANDOM_ITEMS = 10_000


def sid_gr_task(trainer: TrainerArgs, device: torch.device) -> TrainingTask:
    """Returns the task that the parsed gin configuration describes.

    The tables are replicated, so TorchRec's pipeline has no sharded lookup to overlap. The trainer therefore
    runs the pipeline "none" in place of "native".

    Raises:
        ValueError: settings are missing or contradict each other, or a file of the dataset is malformed.
        FileNotFoundError: a file of the dataset does not exist.
    """
    network, dataset = from_gin(NetworkArgs), from_gin(DatasetArgs)
    metrics = RetrievalMetrics(trainer.eval_metrics, trainer.top_k_for_generation, device)
    sids, (train_source, eval_source, *test) = (
        _random_sources(dataset, trainer) if dataset.dataset_type_str == RANDOM else _disk_sources(dataset)
    )
    warn_once(
        *network.settings_without_effect(),
        *dataset.settings_without_effect(),
        *network.shared_positions(train_source.spec.max_tokens),
    )
    config = SIDGRConfig(
        decoder=network.decoder(),
        top_k=trainer.top_k_for_generation,
        contextual_vocab_sizes=dataset.contextual_vocab_sizes,
        share_lm_head=network.share_lm_head_across_hierarchies,
        num_position_buckets=network.num_position_buckets,
        dtype=network.dtype,
    )
    torch.manual_seed(trainer.seed)
    flops = partial(transformer_work, transformer_config(config.decoder))
    train_dataset, eval_dataset = rank_datasets(train_source, eval_source, trainer, dataset.shuffle)
    return TrainingTask(
        model=SIDGR(config, CodeTree(sids, dataset.codebook_sizes)),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        test_dataset=evaluation_dataset(test[0], trainer) if test else None,
        metrics=metrics,
        flops=partial(_flops_of_rows, flops),
        shuffler_name="sid_gr",
        shuffler_settings={"flops": flops},
        has_sharded_tables=False,
        settings=settings_of(network),
    )


def transformer_config(decoder: DecoderConfig) -> TransformerConfig:
    """Returns the dimensions that determine a decoder's FLOPs."""
    return TransformerConfig(
        num_layers=decoder.num_layers,
        hidden_size=decoder.hidden_size,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        mlp_size=decoder.mlp_size,
        gated_mlp=decoder.gated_mlp,
    )


def _random_sources(dataset: DatasetArgs, trainer: TrainerArgs) -> tuple[ItemSIDs, list[SIDSource]]:
    """Returns the items, and training and evaluation samples."""
    spec = dataset.spec()
    sids = random_item_sids(spec.codebook_sizes, _NUM_RANDOM_ITEMS, trainer.seed)
    make = partial(RandomSIDSource, sids, spec, dataset.history_length_dist)
    return sids, [*random_sources(make, dataset.num_generated_batches, trainer)]


def _disk_sources(dataset: DatasetArgs) -> tuple[ItemSIDs, list[SIDSource]]:
    """Returns the items, and the samples for training, for validation if there are any, and for testing."""
    spec = dataset.spec()
    sids = ItemSIDs.load(Path(str(dataset.item_to_sid_mapping_path)), spec.codebook_sizes)
    paths = (
        dataset.sequence_features_training_data_path,
        dataset.sequence_features_validation_data_path,
        dataset.sequence_features_testing_data_path,
    )
    return sids, [SIDSequenceSource(Path(path), sids, spec) for path in paths if path is not None]


def _flops_of_rows(flops: Callable[[torch.Tensor], torch.Tensor], batch: SIDBatch) -> torch.Tensor:
    return flops(batch.num_tokens())
