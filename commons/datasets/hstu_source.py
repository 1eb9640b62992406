"""What samples of the HSTU models come from, and how they become a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from commons.datasets.hstu_batch import HSTUBatch
from commons.datasets.hstu_sample import HSTUSample
from commons.datasets.keyed_rows import keyed_rows
from commons.datasets.sequence_dataset_spec import SequenceDatasetSpec


class HSTUSource(ABC):
    """Samples by index. The same index gives the same sample in every process."""

    @property
    @abstractmethod
    def spec(self) -> SequenceDatasetSpec:
        """What the samples hold."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> HSTUSample: ...

    @property
    def catalogue(self) -> np.ndarray:
        """`[items]` int64, rising: the ids that are items; the whole vocabulary if nothing else is known."""
        return np.arange(self.spec.vocab_sizes[self.spec.item_feature_name])

    def collate(self, samples: Sequence[HSTUSample], batch_size: int) -> HSTUBatch:
        """As `collate_hstu_batch`."""
        return collate_hstu_batch(samples, self.spec, batch_size)


def collate_hstu_batch(
    samples: Sequence[HSTUSample], spec: SequenceDatasetSpec, batch_size: int
) -> HSTUBatch:
    """A host batch of `batch_size` rows: the samples, then padding rows of zero length.

    Raises:
        ValueError: there are more samples than rows, or none and no row.
    """
    ids = {name: [sample.contextual[name] for sample in samples] for name in spec.contextual_feature_names}
    ids[spec.item_feature_name] = [sample.items for sample in samples]
    if spec.action_feature_name is not None:
        ids[spec.action_feature_name] = [_actions(sample) for sample in samples]
    if spec.negatives_feature_name is not None:
        ids[spec.negatives_feature_name] = [sample.negatives for sample in samples]
    features = keyed_rows(ids, batch_size)
    num_candidates = None
    if spec.max_num_candidates:
        num_candidates = torch.zeros(batch_size, dtype=torch.int64)
        num_candidates[: len(samples)] = torch.tensor([sample.num_candidates for sample in samples])
    return HSTUBatch(
        features=features,
        batch_size=batch_size,
        feature_to_max_seqlen=dict(spec.feature_to_max_seqlen),
        contextual_feature_names=list(spec.contextual_feature_names),
        labels=keyed_rows({"label": [sample.labels for sample in samples]}, batch_size),
        actual_batch_size=len(samples),
        item_feature_name=spec.item_feature_name,
        action_feature_name=spec.action_feature_name,
        max_num_candidates=spec.max_num_candidates,
        num_candidates=num_candidates,
        negatives_feature_name=spec.negatives_feature_name,
    )


def _actions(sample: HSTUSample) -> np.ndarray:
    if sample.actions is None:
        raise ValueError("a sample has no actions, but its dataset has an action feature")
    return sample.actions
