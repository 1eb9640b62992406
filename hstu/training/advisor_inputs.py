"""Reads the gin files of the HSTU models for `balance-advisor`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from commons.advisor.pieces import PieceCosts
from commons.advisor.samples import TOKEN_RULES, ConfiguredModel, SampleLengths, TokenRule
from commons.datasets import BenchmarkDatasetArgs, UserSequences, UserSequenceSource
from commons.datasets.gin_values import from_gin, is_bound
from commons.perf_model import HSTUFlops
from hstu.training.model_args import DatasetArgs, NetworkArgs, RetrievalArgs


def configured_model() -> ConfiguredModel:
    """Returns the model that `NetworkArgs` configures."""
    network = from_gin(NetworkArgs)
    flops = HSTUFlops(
        network.num_layers,
        network.hidden_size,
        network.num_attention_heads,
        network.kv_channels,
        network.is_causal,
    )
    pieces = PieceCosts(
        flops.prefix_work,
        network.num_layers,
        network.num_attention_heads,
        network.kv_channels,
        network.dtype.itemsize,
        network.is_causal,
    )
    return ConfiguredModel(flops.work, _described(network), TOKEN_RULES["hstu"], pieces)


def configured_lengths(num_random: int) -> SampleLengths | None:
    """Returns the training samples, `num_random` of them if they are random; None without a dataset."""
    if is_bound("BenchmarkDatasetArgs.feature_args"):
        return _random_lengths(from_gin(BenchmarkDatasetArgs), num_random)
    return _lengths_on_disk() if is_bound("hstu.DatasetArgs.dataset_name") else None


def _described(network: NetworkArgs) -> str:
    return (
        f"HSTU, {network.num_layers} layers of width {network.hidden_size}, "
        f"{network.num_attention_heads} heads of {network.kv_channels}"
    )


def _random_lengths(args: BenchmarkDatasetArgs, num_samples: int) -> SampleLengths:
    rng = np.random.default_rng(0)
    used = args.spec().feature_to_max_seqlen.keys()
    tokens = np.zeros(num_samples, dtype=np.int64)
    for features in args.feature_args:
        lengths = features.lengths(rng, num_samples)
        tokens += lengths * len(used & set(features.feature_names))
        if args.item_feature_name in features.feature_names:
            items = lengths
    return SampleLengths(items, tokens, f"the ids of {', '.join(used)}", "random samples")


def _lengths_on_disk() -> SampleLengths:
    args = from_gin(DatasetArgs)
    path = Path("data") / args.dataset_name if args.dataset_path is None else Path(args.dataset_path)
    sequences = UserSequences.open(path, args.dataset_name)
    retrieval = from_gin(RetrievalArgs) if is_bound("RetrievalArgs.num_negatives") else None
    source = UserSequenceSource(sequences, "train", **args.source_options(retrieval is not None))
    per_item, extra = 2, len(sequences.meta.contextual_feature_names)
    if retrieval is not None:
        per_item, extra = 1 + retrieval.use_actions, extra * retrieval.use_contextual_features
    rule = TokenRule(per_item, extra)
    return SampleLengths(source.num_items, rule.of(source.num_items), str(rule), str(path))
