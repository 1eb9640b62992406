"""The batch of models that generate semantic IDs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commons.datasets.sid_spec import CANDIDATE, HISTORY
from commons.sequence_batch import BaseBatch


@dataclass(eq=False)
class SIDBatch(BaseBatch):
    """A batch of item histories, each item as its semantic ID: `num_hierarchies` codes in order.

    `features` has the contextual features, the history's codes, oldest item first, and the candidates' codes:
    the items to be predicted, each from all that is before it. A sample has at least one candidate; the last
    one is what retrieval is about. All candidate codes are loss tokens.

    A model sees a sample as its contextual ids, its history's codes, and for each candidate a token that
    marks the beginning (BOS) and the codes; the very last code predicts nothing and is left out.

    Attributes:
        history_feature_name: key of `features` with the history's codes.
        candidate_feature_name: key of `features` with the candidates' codes.
        num_hierarchies: codes per item, at least 1.
        target_items: `[batch_size]` int64, the item that each sample's last candidate is, or None; any value
            for padding rows.

    Raises:
        ValueError: `num_hierarchies` is not positive, or a feature is missing.
    """

    history_feature_name: str = HISTORY
    candidate_feature_name: str = CANDIDATE
    num_hierarchies: int = 1
    target_items: torch.Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_hierarchies < 1:
            raise ValueError(f"num_hierarchies is {self.num_hierarchies}; expected at least 1")
        keys = self.features.keys()
        for name in (*self.contextual_feature_names, self.history_feature_name, self.candidate_feature_name):
            if name not in keys:
                raise ValueError(f"features has no key {name!r}; it has {keys}")

    def feature_lengths(self, name: str) -> torch.Tensor:
        """`[batch_size]` int64: ids that each row has of a feature."""
        lengths = self.features.lengths().view(-1, self.batch_size)
        return lengths[self.features.keys().index(name)].long()

    def num_tokens(self) -> torch.Tensor:
        """`[batch_size]` int64: tokens of each row as a model sees it; 0 for padding rows."""
        codes = self.feature_lengths(self.candidate_feature_name)
        tokens = codes + codes // self.num_hierarchies - (codes > 0).long()
        for name in (*self.contextual_feature_names, self.history_feature_name):
            tokens = tokens + self.feature_lengths(name)
        return tokens

    def num_loss_tokens(self) -> torch.Tensor:
        """`[batch_size]` int64: candidate codes of each row; 0 for padding rows."""
        return self.feature_lengths(self.candidate_feature_name)
