"""Samples whose next items are to be retrieved, with the items to tell them from."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Literal

import numpy as np

from commons.datasets.hstu_sample import HSTUSample
from commons.datasets.hstu_source import HSTUSource
from commons.datasets.sequence_dataset_spec import SequenceDatasetSpec

NEGATIVES = "negative_items"

# Seeds of fewer words are filled up with zeros: with this as the fourth, no other draw has the same.
_STREAM = 1


class RetrievalSource(HSTUSource):
    """Another source's histories, labelled with the items themselves.

    - A training sample has every item but its first as a label, and `num_negatives` negatives, which all
      its labels share: drawn uniformly and with replacement from the catalogue, by a generator seeded
      with `seed`, the epoch and the sample's index. So a sample has the same wherever it is computed.
    - An evaluation sample has its last item as its only label, if another one is before it, and no
      negatives.

    Negatives are one more feature, `NEGATIVES`, of the items' table.

    Args:
        histories: samples without candidates; what is held out of training must not be in those of
            "train".
        split: which of the two.
        num_negatives: of a training sample, at least 1.
        seed: at least 0.

    Raises:
        ValueError: a value is out of range, the histories have candidates or never two items, or a
            feature of theirs has the negatives' name.
    """

    def __init__(
        self, histories: HSTUSource, split: Literal["train", "eval"], num_negatives: int, seed: int
    ) -> None:
        if split not in ("train", "eval"):
            raise ValueError(f"split = {split!r}: expected train or eval")
        if num_negatives < 1 or seed < 0:
            raise ValueError(
                f"num_negatives = {num_negatives}, seed = {seed}: expected at least 1 and at least 0"
            )
        self._histories = histories
        self._split = split
        self._num_negatives = num_negatives
        self._seed = seed
        self._epoch = 0
        self._catalogue = histories.catalogue
        self._spec = _with_negatives(histories.spec, num_negatives)

    @property
    def spec(self) -> SequenceDatasetSpec:
        """What the samples hold; the same for both splits."""
        return self._spec

    @property
    def catalogue(self) -> np.ndarray:
        """That of the histories."""
        return self._catalogue

    def of_epoch(self, epoch: int) -> RetrievalSource:
        """The same samples with the negatives of an epoch; this source's own are those of epoch 0."""
        other = copy.copy(self)
        other._epoch = epoch
        return other

    def __len__(self) -> int:
        return len(self._histories)

    def __getitem__(self, index: int) -> HSTUSample:
        sample = self._histories[index]
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


def _with_negatives(spec: SequenceDatasetSpec, num_negatives: int) -> SequenceDatasetSpec:
    if spec.max_num_candidates:
        raise ValueError(
            f"max_num_candidates = {spec.max_num_candidates}: expected 0, because retrieval predicts "
            "the items of the history and takes no candidates"
        )
    longest = spec.feature_to_max_seqlen[spec.item_feature_name]
    if longest < 2:
        raise ValueError(
            f"samples have at most {longest} items: expected at least 2, one to predict the other from"
        )
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
