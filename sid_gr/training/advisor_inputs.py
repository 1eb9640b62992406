"""Reads the gin files of the SID-GR model for `balance-advisor`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from commons.advisor.files import read_lengths
from commons.advisor.pieces import PieceCosts
from commons.advisor.samples import ConfiguredModel, SampleLengths, TokenRule
from commons.datasets import random_history_lengths
from commons.datasets.gin_values import from_gin, is_bound
from commons.datasets.sid_sequences import SEQUENCE_COLUMN
from commons.perf_model import transformer_work
from sid_gr.training.model_args import RANDOM, DatasetArgs, NetworkArgs
from sid_gr.training.sid_gr_task import transformer_config


def configured_model() -> ConfiguredModel:
    """Returns the model that `NetworkArgs` configures."""
    network = from_gin(NetworkArgs)
    decoder = network.decoder()
    description = (
        f"SID-GR, {decoder.num_layers} layers of width {decoder.hidden_size}, {decoder.num_heads} heads of "
        f"{decoder.head_dim}"
    )
    work = partial(transformer_work, transformer_config(decoder))
    pieces = PieceCosts(
        lambda first, _: work(first),
        decoder.num_layers,
        decoder.num_kv_heads,
        decoder.head_dim,
        network.dtype.itemsize,
    )
    tokens = TokenRule(from_gin(DatasetArgs).num_hierarchies, 0)
    return ConfiguredModel(work, description, tokens, pieces)


def configured_lengths(num_random: int) -> SampleLengths | None:
    """Returns the training samples, `num_random` of them if they are random; None without a dataset.

    A length counts all items, including the target.
    """
    if not is_bound("sid_gr.DatasetArgs.dataset_name"):
        return None
    args = from_gin(DatasetArgs)
    spec = args.spec()
    if args.dataset_type_str == RANDOM:
        rng = np.random.default_rng(0)
        histories = random_history_lengths(args.history_length_dist, spec.max_history_length, rng, num_random)
        items, source = histories + 1, "random samples"
    else:
        path = Path(str(args.sequence_features_training_data_path))
        items, source = read_lengths(path, SEQUENCE_COLUMN).clip(max=spec.max_items), str(path)
    # As in SIDBatch: every candidate has a BOS, and the very last code is left out.
    candidates = items.clip(max=spec.max_candidates)
    tokens = len(spec.contextual_vocab_sizes) + spec.num_hierarchies * items + candidates - 1
    return SampleLengths(
        items, tokens, f"{spec.num_hierarchies} codes an item, and a BOS a candidate", source
    )
