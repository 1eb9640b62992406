"""What samples of models that generate semantic IDs come from, and how they become a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from commons.datasets.keyed_rows import keyed_rows
from commons.datasets.sid_batch import SIDBatch
from commons.datasets.sid_spec import CANDIDATE, HISTORY, SIDDatasetSpec


@dataclass(frozen=True)
class SIDSample:
    """A user's items as semantic IDs; all arrays are int64.

    Attributes:
        codes: `[items, num_hierarchies]`, oldest item first, at least one item; the last is the target.
        target_item: id of the last item.
        contextual: `[ids]` by contextual feature.
    """

    codes: np.ndarray
    target_item: int
    contextual: dict[str, np.ndarray] = field(default_factory=dict)


class SIDSource(ABC):
    """Samples by index. The same index gives the same sample in every process."""

    @property
    @abstractmethod
    def spec(self) -> SIDDatasetSpec:
        """What the samples hold."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> SIDSample:
        """A sample of at most `spec.max_items` items."""

    def collate(self, samples: Sequence[SIDSample], batch_size: int) -> SIDBatch:
        """A host batch of `batch_size` rows: the samples, then padding rows of zero length.

        Of each sample the newest `spec.max_candidates` items, or as many as it has, are candidates.

        Raises:
            ValueError: there are more samples than rows, or there is no row.
        """
        spec = self.spec
        ids = {name: [sample.contextual[name] for sample in samples] for name in spec.contextual_vocab_sizes}
        newest = spec.max_candidates
        splits = [np.split(sample.codes, [max(len(sample.codes) - newest, 0)]) for sample in samples]
        ids[HISTORY] = [history.reshape(-1) for history, _ in splits]
        ids[CANDIDATE] = [candidates.reshape(-1) for _, candidates in splits]
        target_items = torch.zeros(batch_size, dtype=torch.int64)
        features = keyed_rows(ids, batch_size)
        target_items[: len(samples)] = torch.tensor([sample.target_item for sample in samples])
        return SIDBatch(
            features=features,
            batch_size=batch_size,
            feature_to_max_seqlen=spec.feature_to_max_seqlen,
            contextual_feature_names=list(spec.contextual_vocab_sizes),
            actual_batch_size=len(samples),
            history_feature_name=HISTORY,
            candidate_feature_name=CANDIDATE,
            num_hierarchies=spec.num_hierarchies,
            target_items=target_items,
        )
