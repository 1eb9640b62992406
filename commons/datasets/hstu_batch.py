"""Data of the HSTU models: dataset specs, samples, and batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..sequence_batch import BaseBatch
from ..unbounded_ids import NO_ID
from .embedding_args import DynamicEmbeddingArgs, EmbeddingArgs
from .sample_source import SampleSource, keyed_rows, padded


@dataclass(frozen=True)
class SequenceDatasetSpec:
    """Features, tables, and labels of a dataset, which determine the sizes of a model for it.

    Attributes:
        contextual_feature_names: names of the features that describe the user.
        item_feature_name: name of the feature with the items.
        action_feature_name: name of the feature with one action per item, or None.
        feature_to_max_seqlen: length of each feature's longest sequence. For items and actions, it counts
            history and candidates together.
        tables: embedding tables, which together serve each feature once.
        max_num_candidates: largest number of candidates per sample. 0 means that samples have none.
        num_classes: number of classes. Labels are in [0, num_classes).
        positive_class: first class that counts as positive. None means that classes have no order.
        num_tasks: number of tasks. If it is above 1, labels are bit masks of tasks, and `num_classes` is 2 **
            `num_tasks`.
        negatives_feature_name: name of the feature with sampled negatives, or None.

    Raises:
        ValueError: a feature has no table, several tables, or no entry in `feature_to_max_seqlen`.
    """

    contextual_feature_names: tuple[str, ...]
    item_feature_name: str
    action_feature_name: str | None
    feature_to_max_seqlen: dict[str, int]
    tables: tuple[EmbeddingArgs, ...]
    max_num_candidates: int
    num_classes: int
    positive_class: int | None
    num_tasks: int = 1
    negatives_feature_name: str | None = None

    def __post_init__(self) -> None:
        served = [feature for table in self.tables for feature in table.feature_names]
        for feature in self.feature_names:
            count = served.count(feature)
            if count != 1:
                raise ValueError(f"feature {feature!r} is in {count} embedding tables, not one")
            if feature not in self.feature_to_max_seqlen:
                raise ValueError(f"feature {feature!r} has no entry in feature_to_max_seqlen")

    @property
    def feature_names(self) -> list[str]:
        """All features in batch order: contextual, items, actions, negatives."""
        optional = (self.action_feature_name, self.negatives_feature_name)
        names = [*self.contextual_feature_names, self.item_feature_name]
        return names + [name for name in optional if name is not None]

    @property
    def vocab_sizes(self) -> dict[str, int]:
        """Number of rows of each feature's table. Ids are below it, except in unbounded features."""
        return {
            feature: table.item_vocab_size_or_capacity
            for table in self.tables
            for feature in table.feature_names
        }

    @property
    def unbounded_features(self) -> frozenset[str]:
        """Features of dynamic tables, whose ids are any int64 except the smallest."""
        return frozenset(
            feature
            for table in self.tables
            if isinstance(table, DynamicEmbeddingArgs)
            for feature in table.feature_names
        )


@dataclass(frozen=True)
class HSTUSample:
    """One user's history and actions. All arrays are int64.

    Attributes:
        contextual: `[ids]` of each contextual feature, usually one id.
        items: `[items]`, oldest first, candidates last.
        actions: `[items]`, or None if the dataset has no actions.
        labels: `[labels]` for the last items. Each is a class, a bit mask of tasks, or the item itself.
        num_candidates: number of candidates, which are the last items.
        negatives: `[negatives]` sampled items, which training contrasts with the right items.
    """

    contextual: dict[str, np.ndarray]
    items: np.ndarray
    actions: np.ndarray | None
    labels: np.ndarray
    num_candidates: int
    negatives: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


@dataclass(eq=False)
class HSTUBatch(BaseBatch):
    """A batch of item histories and the actions on them.

    `features` has the contextual features, the item feature, and optionally the action feature, with one
    action per item. A sample's items are its history, oldest first, then `num_candidates` items to score.
    `labels` is a KeyedJaggedTensor with one key. It has one label for each of a sample's last items: all
    items, the candidates, or the tail that an evaluation predicts.

    Negatives are looked up like items and travel with their sample, but no layer sees them. So `num_tokens`
    does not count them, and neither do workloads and token limits.

    Attributes:
        item_feature_name: key of `features` with the items.
        action_feature_name: key of `features` with the actions, or None.
        max_num_candidates: largest number of candidates per sample. 0 means that samples have none.
        num_candidates: `[batch_size]` int64 numbers of candidates, which are a sample's last items. None if
            `max_num_candidates` is 0.
        negatives_feature_name: key of `features` with the negatives, or None.
    """

    item_feature_name: str = "item"
    action_feature_name: str | None = None
    max_num_candidates: int = 0
    num_candidates: torch.Tensor | None = None
    negatives_feature_name: str | None = None

    def num_tokens(self) -> torch.Tensor:
        """Returns the tokens of each row, `[batch_size]` int64: its ids except negatives, 0 for padding."""
        tokens = super().num_tokens()
        if self.negatives_feature_name is None:
            return tokens
        keys = self.features.keys()
        negatives = self.features.lengths().view(len(keys), self.batch_size)
        return tokens - negatives[keys.index(self.negatives_feature_name)]

    def num_contextual_tokens(self) -> torch.Tensor:
        """Returns the contextual tokens of each row, `[batch_size]` int64."""
        keys = self.features.keys()
        lengths = self.features.lengths().view(len(keys), self.batch_size)
        return lengths[[keys.index(name) for name in self.contextual_feature_names]].sum(0, dtype=torch.int64)

    def num_candidate_tokens(self) -> torch.Tensor | None:
        """Returns the candidate tokens of each row, `[batch_size]` int64, or None without candidates."""
        if self.num_candidates is None:
            return None
        return self.num_candidates * (1 if self.action_feature_name is None else 2)

    def row_counts(self) -> dict[str, torch.Tensor]:
        """Returns the number of candidates of each row, which sizes the sequences."""
        return {} if self.num_candidates is None else {"num_candidates": self.num_candidates}


class HSTUSource(SampleSource):
    """Samples by index. An index gives the same sample in every process.

    Attributes:
        spec: features, tables, and labels of the samples.
    """

    spec: SequenceDatasetSpec

    @abstractmethod
    def __getitem__(self, index: int) -> HSTUSample: ...

    @property
    def catalogue(self) -> np.ndarray:
        """All item ids, int64 `[items]`, ascending. Defaults to the whole vocabulary."""
        return np.arange(self.spec.vocab_sizes[self.spec.item_feature_name])

    def collate(self, samples: Sequence[HSTUSample], batch_size: int) -> HSTUBatch:
        """Calls `collate_hstu_batch` with this source's spec."""
        return collate_hstu_batch(samples, self.spec, batch_size)


def collate_hstu_batch(
    samples: Sequence[HSTUSample], spec: SequenceDatasetSpec, batch_size: int
) -> HSTUBatch:
    """Returns a host batch of `batch_size` rows: the samples, then padding rows of length 0.

    Raises:
        ValueError: there are more samples than rows, `batch_size` is 0, or a sample lacks actions.
    """
    ids = {name: [sample.contextual[name] for sample in samples] for name in spec.contextual_feature_names}
    ids[spec.item_feature_name] = [sample.items for sample in samples]
    if spec.action_feature_name is not None:
        actions = [sample.actions for sample in samples if sample.actions is not None]
        if len(actions) < len(samples):
            raise ValueError("a sample has no actions, but its dataset has an action feature")
        ids[spec.action_feature_name] = actions
    if spec.negatives_feature_name is not None:
        ids[spec.negatives_feature_name] = [sample.negatives for sample in samples]
    features = keyed_rows(ids, batch_size)
    num_candidates = None
    if spec.max_num_candidates:
        num_candidates = padded([sample.num_candidates for sample in samples], batch_size)
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


def check_ids(batch: HSTUBatch, spec: SequenceDatasetSpec) -> None:
    """Checks that the embedding tables can look up every id of a host batch.

    Lookups check nothing. Ids past a sharded table's end train silently, and negative ids kill the process.

    Raises:
        ValueError: an id is outside its feature's vocabulary, or is the smallest int64 in a dynamic table.
    """
    features = batch.features
    vocab_sizes, unbounded = spec.vocab_sizes, spec.unbounded_features
    ends = features.offset_per_key()
    for index, name in enumerate(features.keys()):
        values = features.values()[ends[index] : ends[index + 1]]
        if not values.numel():
            continue
        if name in unbounded:
            least, most = NO_ID + 1, torch.iinfo(torch.int64).max
            reason = "ids of a dynamic table may be any int64 except the smallest, which means no id"
        else:
            least, most = 0, vocab_sizes[name] - 1
            reason = f"its table has {vocab_sizes[name]} rows, so ids are 0 to {most}"
        smallest, largest = torch.aminmax(values)
        if int(smallest) < least or int(largest) > most:
            position = int(torch.nonzero((values < least) | (values > most))[0])
            lengths = features.lengths().view(-1, batch.batch_size)[index]
            row = int(torch.searchsorted(lengths.cumsum(0), position, right=True))
            raise ValueError(f"feature {name!r} has id {int(values[position])} in row {row}; {reason}")
