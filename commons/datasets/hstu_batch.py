"""The batch of the HSTU models."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commons.sequence_batch import BaseBatch


@dataclass(eq=False)
class HSTUBatch(BaseBatch):
    """A batch of item histories with the actions taken on them.

    `features` has the contextual features, the item feature and, if there is one, the action feature, which
    has one action per item. A sample's items are its history, oldest first, and behind it
    `num_candidates` items to be scored. `labels` is a KeyedJaggedTensor of one key; a sample's labels belong
    to its last items, one each: all its items, its candidates, or the tail that an evaluation is about.

    Negatives are looked up like items and travel with their sample, but they are no part of its
    sequence: no layer sees them, so `num_tokens`, and with it workloads and caps of tokens, leaves them
    out.

    Attributes:
        item_feature_name: key of `features` with the items.
        action_feature_name: key of `features` with the actions, or None.
        max_num_candidates: the most candidates a sample may have; 0 means that there are none.
        num_candidates: `[batch_size]` int64, how many of a sample's last items are candidates; None if
            `max_num_candidates` is 0.
        negatives_feature_name: key of `features` with the negatives, or None.
    """

    item_feature_name: str = "item"
    action_feature_name: str | None = None
    max_num_candidates: int = 0
    num_candidates: torch.Tensor | None = None
    negatives_feature_name: str | None = None

    def num_tokens(self) -> torch.Tensor:
        """`[batch_size]` int64: ids of each row's sequence, which are its tokens; 0 for padding rows."""
        tokens = super().num_tokens()
        if self.negatives_feature_name is None:
            return tokens
        keys = self.features.keys()
        negatives = self.features.lengths().view(len(keys), self.batch_size)
        return tokens - negatives[keys.index(self.negatives_feature_name)]
