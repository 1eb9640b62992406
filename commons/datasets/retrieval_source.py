"""Samples for next-item retrieval, with sampled negatives."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Literal

import numpy as np

from ..argument_checks import require, require_at_least
from .hstu_batch import HSTUSample, HSTUSource, SequenceDatasetSpec
from .sample_source import PerEpochSource

NEGATIVES = "negative_items"

# Fourth word of the seed. numpy pads shorter seeds with zeros, so no other draw shares this seed.
_STREAM = 1


class RetrievalSource(HSTUSource):
    """Another source's histories, labeled with the items themselves.

    - In a training sample, every item except the first is a label. All its labels share `num_negatives`
      negatives, drawn uniformly with replacement from the catalog. Their generator is seeded with `seed`, the
      epoch, and the sample's index, so a sample has the same negatives on any rank.
    - In an evaluation sample, only the last item is a label, if another item precedes it. There are no
      negatives.

    The negatives are an additional feature of the items' table, named `NEGATIVES`.

    Args:
        histories: samples without candidates. Samples for "train" must not contain held-out items.
        split: "train" or "eval".
        num_negatives: number of negatives per training sample, at least 1.
        seed: seed of the negatives, at least 0.
        use_actions, use_contextual_features: whether samples have the actions, and the features of the user.

    Raises:
        ValueError: a value is out of range, the histories have candidates or at most one item, or one of
            their features is named `NEGATIVES`.
    """

    def __init__(
        self,
        histories: HSTUSource,
        split: Literal["train", "eval"],
        num_negatives: int,
        seed: int,
        use_actions: bool = True,
        use_contextual_features: bool = True,
    ) -> None:
        require(split in ("train", "eval"), "split", split, "train or eval")
        require_at_least(1, "num_negatives", num_negatives)
        require_at_least(0, "seed", seed)
        spec = _without_features(histories.spec, use_actions, use_contextual_features)
        self.spec = _with_negatives(spec, num_negatives)  # equal for both splits
        self._histories = histories
        self._split = split
        self._num_negatives = num_negatives
        self._seed = seed
        self._epoch = 0
        self._catalogue = histories.catalogue

    @property
    def catalogue(self) -> np.ndarray:
        """All item ids of the histories, int64 `[items]`, ascending."""
        return self._catalogue

    def for_epoch(self, epoch: int) -> RetrievalSource:
        """Returns a copy with the histories and negatives of `epoch`. New ones have epoch 0's negatives."""
        other = copy.copy(self)
        if isinstance(self._histories, PerEpochSource):
            other._histories = self._histories.for_epoch(epoch)
        other._epoch = epoch
        return other

    def __len__(self) -> int:
        return len(self._histories)

    def __getitem__(self, index: int) -> HSTUSample:
        sample = self._histories[index]
        contextual = {name: sample.contextual[name] for name in self.spec.contextual_feature_names}
        actions = None if self.spec.action_feature_name is None else sample.actions
        sample = replace(sample, contextual=contextual, actions=actions)
        predictable = max(len(sample.items) - 1, 0)
        if self._split == "eval":
            return replace(sample, labels=sample.items[len(sample.items) - min(predictable, 1) :])
        rng = np.random.default_rng((self._seed, self._epoch, index, _STREAM))
        places = rng.integers(0, len(self._catalogue), self._num_negatives)
        return replace(
            sample,
            labels=sample.items[len(sample.items) - predictable :],
            negatives=self._catalogue[places],
        )


def _without_features(
    spec: SequenceDatasetSpec, actions: bool, contextual_features: bool
) -> SequenceDatasetSpec:
    """Returns a spec without actions, or without contextual features, and without their tables."""
    dropped = set() if contextual_features else set(spec.contextual_feature_names)
    dropped |= set() if actions or spec.action_feature_name is None else {spec.action_feature_name}
    kept = {id(table): [name for name in table.feature_names if name not in dropped] for table in spec.tables}
    tables = (replace(table, feature_names=kept[id(table)]) for table in spec.tables if kept[id(table)])
    return replace(
        spec,
        contextual_feature_names=spec.contextual_feature_names if contextual_features else (),
        action_feature_name=spec.action_feature_name if actions else None,
        tables=tuple(tables),
    )


def _with_negatives(spec: SequenceDatasetSpec, num_negatives: int) -> SequenceDatasetSpec:
    candidates, longest = spec.max_num_candidates, spec.feature_to_max_seqlen[spec.item_feature_name]
    expected = "0, because retrieval predicts the items of the history and takes no candidates"
    require(not candidates, "max_num_candidates", candidates, expected)
    expected = "at least 2, one to predict the other from"
    require(longest >= 2, "most items of a sample", longest, expected)
    if NEGATIVES in spec.feature_names:
        raise ValueError(f"a feature is named {NEGATIVES!r}, as the negatives are: give it another name")
    return replace(
        spec,
        tables=tuple(
            replace(table, feature_names=[*table.feature_names, NEGATIVES])
            if spec.item_feature_name in table.feature_names
            else table
            for table in spec.tables
        ),
        feature_to_max_seqlen={**spec.feature_to_max_seqlen, NEGATIVES: num_negatives},
        negatives_feature_name=NEGATIVES,
    )
