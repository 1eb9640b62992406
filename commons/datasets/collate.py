"""Samples to a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets.hstu_batch import HSTUBatch
from commons.datasets.hstu_sample import HSTUSample
from commons.datasets.sequence_dataset_spec import SequenceDatasetSpec


def collate_hstu_batch(
    samples: Sequence[HSTUSample], spec: SequenceDatasetSpec, batch_size: int
) -> HSTUBatch:
    """A host batch of `batch_size` rows: the samples, then padding rows of zero length.

    Raises:
        ValueError: there are more samples than rows, or none and no row.
    """
    if len(samples) > batch_size:
        raise ValueError(f"{len(samples)} samples do not fit in a batch of {batch_size} rows")
    num_candidates = None
    if spec.max_num_candidates:
        num_candidates = torch.zeros(batch_size, dtype=torch.int64)
        num_candidates[: len(samples)] = torch.tensor([sample.num_candidates for sample in samples])
    ids = {name: [sample.contextual[name] for sample in samples] for name in spec.contextual_feature_names}
    ids[spec.item_feature_name] = [sample.items for sample in samples]
    if spec.action_feature_name is not None:
        ids[spec.action_feature_name] = [_actions(sample) for sample in samples]
    return HSTUBatch(
        features=_keyed_jagged(ids, batch_size),
        batch_size=batch_size,
        feature_to_max_seqlen=dict(spec.feature_to_max_seqlen),
        contextual_feature_names=list(spec.contextual_feature_names),
        labels=_keyed_jagged({"label": [sample.labels for sample in samples]}, batch_size),
        actual_batch_size=len(samples),
        item_feature_name=spec.item_feature_name,
        action_feature_name=spec.action_feature_name,
        max_num_candidates=spec.max_num_candidates,
        num_candidates=num_candidates,
    )


def _actions(sample: HSTUSample) -> np.ndarray:
    if sample.actions is None:
        raise ValueError("a sample has no actions, but its dataset has an action feature")
    return sample.actions


def _keyed_jagged(rows_by_key: dict[str, list[np.ndarray]], batch_size: int) -> KeyedJaggedTensor:
    """Every key's rows, and zero-length ones behind them up to `batch_size`."""
    lengths = torch.zeros(len(rows_by_key), batch_size, dtype=torch.int64)
    for key_lengths, rows in zip(lengths, rows_by_key.values(), strict=True):
        key_lengths[: len(rows)] = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    empty = np.empty(0, dtype=np.int64)  # concatenate needs at least one array
    values = np.concatenate([empty, *(row for rows in rows_by_key.values() for row in rows)])
    return KeyedJaggedTensor(
        keys=list(rows_by_key), values=torch.from_numpy(values), lengths=lengths.flatten()
    )
