"""Turns embedded features into the token sequences of the HSTU layers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.jagged_indices import spread
from hstu.modules.hstu_config import HSTUConfig, HSTUFeatures
from hstu.modules.sequence_structure import SequenceStructure

_POSITION_STD = 0.02


class SequencePreprocessor(nn.Module):
    """Interleaves a sample's embedded features into one sequence and adds position embeddings.

    A sample's tokens are its contextual features in order, then item₁ action₁ item₂ action₂ …, candidates
    last. A token's position is its place in the sample, as in `SequenceStructure.token_positions`, clamped
    to the last bucket. Embeddings of another width than a token's go through a linear layer. Dropout applies
    to the sums, as it does after each layer.
    """

    def __init__(self, config: HSTUConfig, features: HSTUFeatures) -> None:
        super().__init__()
        self.features = features
        self.item_projection = projection(config.item_embedding_dim, config.hidden_size)
        if features.action is not None:
            self.action_projection = projection(config.item_embedding_dim, config.hidden_size)
        if features.contextual:
            self.contextual_projection = projection(config.contextual_embedding_dim, config.hidden_size)
        self.position_embedding = nn.Embedding(config.num_position_buckets, config.hidden_size)
        nn.init.normal_(self.position_embedding.weight, std=_POSITION_STD)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        embedded: Mapping[str, JaggedTensor],
        num_candidates: torch.Tensor | None,
        counts: Mapping[str, np.ndarray],
        pieces: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, SequenceStructure]:
        """Returns the tokens, `[total_tokens, hidden_size]`, and their layout.

        Does not synchronize host and device.

        Args:
            embedded: values `[num_ids of the feature, embedding_dim]` of B samples, by feature name.
            num_candidates: number of each sample's last items that are candidates, `[B]` integers, or None.
            counts: result of `HSTUBatch.row_counts_on_host`: lengths of the features, and the candidates.
            pieces: places of the rows, `[B]` of dtype `PIECE`, if the batch has pieces of samples; else None.

        Raises:
            ValueError: the lengths disagree; see `SequenceStructure.of`.
        """
        structure = self._structure(embedded, num_candidates, counts, pieces)
        parts: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        starts = structure.offsets
        for name in self.features.contextual:
            feature = embedded[name]
            parts.append(self.contextual_projection(feature.values()))
            places.append(spread(starts, feature.lengths(), len(feature.values())))
            starts = starts + feature.lengths()
        items = embedded[self.features.item].values()
        own_items = structure.own_items()
        if own_items is not None:
            items = items.index_select(0, own_items)
        item_places = structure.item_tokens()
        parts.append(self.item_projection(items))
        places.append(item_places)
        if self.features.action is not None:
            parts.append(self.action_projection(embedded[self.features.action].values()))
            places.append(item_places + 1)
        # The residual stream keeps the parameters' dtype, even if autocast gave the projections another.
        dtype = self.position_embedding.weight.dtype
        grouped_by_feature = torch.cat([part.to(dtype) for part in parts])
        tokens = torch.empty_like(grouped_by_feature).index_copy(0, torch.cat(places), grouped_by_feature)
        last_bucket = self.position_embedding.num_embeddings - 1
        positions = self.position_embedding(structure.token_positions().clamp(max=last_bucket))
        return self.dropout(tokens + positions), structure

    def _structure(
        self,
        embedded: Mapping[str, JaggedTensor],
        num_candidates: torch.Tensor | None,
        counts: Mapping[str, np.ndarray],
        pieces: np.ndarray | None,
    ) -> SequenceStructure:
        names = self.features
        item_lengths = embedded[names.item].lengths()
        contextual_lengths = torch.zeros_like(item_lengths)
        for name in names.contextual:
            contextual_lengths = contextual_lengths + embedded[name].lengths()
        items = counts[f"features.{names.item}"]
        none = np.zeros_like(items)
        on_host = [
            sum((counts[f"features.{name}"] for name in names.contextual), none),
            items,
            items if names.action is None else counts[f"features.{names.action}"],
            none if num_candidates is None else counts["num_candidates"],
        ]
        return SequenceStructure.of(
            contextual_lengths,
            item_lengths,
            num_candidates,
            tokens_per_item=1 if names.action is None else 2,
            on_host=[per_row.tolist() for per_row in on_host],
            pieces=pieces,
        )


def projection(width_in: int, width_out: int) -> nn.Module:
    """Returns a linear layer, or the identity if the widths are equal."""
    return nn.Identity() if width_in == width_out else nn.Linear(width_in, width_out)
