"""Turns embedded features into the token sequences of the HSTU layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.jagged_indices import spread
from hstu.modules.sequence_structure import SequenceStructure

_POSITION_STD = 0.02


class SequencePreprocessor(nn.Module):
    """Interleaves a sample's embedded features into one sequence and adds position embeddings.

    A sample's tokens are its contextual features in the order of `contextual_feature_names`, then
    item₁ action₁ item₂ action₂ …, candidates last. A token's position is its place in the sample, as in
    `SequenceStructure.token_positions`, clamped to the last bucket.

    Args:
        contextual_feature_names: contextual features in the order of their tokens; may be empty.
        item_feature_name: feature of the items.
        action_feature_name: feature with one action per item; None for items without actions.
        contextual_embedding_dim: width of the contextual embeddings.
        item_embedding_dim: width of the item and the action embeddings.
        hidden_size: width of a token; embeddings of another width go through a linear layer.
        num_position_buckets: number of positions with their own embedding.
        device: device of the parameters.

    Raises:
        ValueError: `num_position_buckets` is not positive.
    """

    def __init__(
        self,
        contextual_feature_names: Sequence[str],
        item_feature_name: str,
        action_feature_name: str | None,
        contextual_embedding_dim: int,
        item_embedding_dim: int,
        hidden_size: int,
        num_position_buckets: int,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if num_position_buckets < 1:
            raise ValueError(f"num_position_buckets is {num_position_buckets}; expected at least 1")
        self.contextual_feature_names = tuple(contextual_feature_names)
        self.item_feature_name = item_feature_name
        self.action_feature_name = action_feature_name
        self.item_projection = projection(item_embedding_dim, hidden_size, device)
        if action_feature_name is not None:
            self.action_projection = projection(item_embedding_dim, hidden_size, device)
        if self.contextual_feature_names:
            self.contextual_projection = projection(contextual_embedding_dim, hidden_size, device)
        self.position_embedding = nn.Embedding(num_position_buckets, hidden_size, device=device)
        nn.init.normal_(self.position_embedding.weight, std=_POSITION_STD)

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
        for name in self.contextual_feature_names:
            feature = embedded[name]
            parts.append(self.contextual_projection(feature.values()))
            places.append(spread(starts, feature.lengths(), len(feature.values())))
            starts = starts + feature.lengths()
        items = embedded[self.item_feature_name].values()
        own_items = structure.own_items()
        if own_items is not None:
            items = items.index_select(0, own_items)
        item_places = structure.item_tokens()
        parts.append(self.item_projection(items))
        places.append(item_places)
        if self.action_feature_name is not None:
            parts.append(self.action_projection(embedded[self.action_feature_name].values()))
            places.append(item_places + 1)
        # The residual stream keeps the parameters' dtype, even if autocast gave the projections another.
        dtype = self.position_embedding.weight.dtype
        grouped_by_feature = torch.cat([part.to(dtype) for part in parts])
        tokens = torch.empty_like(grouped_by_feature).index_copy(0, torch.cat(places), grouped_by_feature)
        last_bucket = self.position_embedding.num_embeddings - 1
        return tokens + self.position_embedding(structure.token_positions().clamp(max=last_bucket)), structure

    def _structure(
        self,
        embedded: Mapping[str, JaggedTensor],
        num_candidates: torch.Tensor | None,
        counts: Mapping[str, np.ndarray],
        pieces: np.ndarray | None,
    ) -> SequenceStructure:
        item_lengths = embedded[self.item_feature_name].lengths()
        contextual_lengths = torch.zeros_like(item_lengths)
        for name in self.contextual_feature_names:
            contextual_lengths = contextual_lengths + embedded[name].lengths()
        items = counts[f"features.{self.item_feature_name}"]
        none = np.zeros_like(items)
        has_actions = self.action_feature_name is not None
        on_host = [
            sum((counts[f"features.{name}"] for name in self.contextual_feature_names), none),
            items,
            counts[f"features.{self.action_feature_name}"] if has_actions else items,
            none if num_candidates is None else counts["num_candidates"],
        ]
        return SequenceStructure.of(
            contextual_lengths,
            item_lengths,
            num_candidates,
            tokens_per_item=2 if has_actions else 1,
            on_host=[per_row.tolist() for per_row in on_host],
            pieces=pieces,
        )


def projection(width_in: int, width_out: int, device: torch.device | None) -> nn.Module:
    """Returns a linear layer, or the identity if the widths are equal."""
    return nn.Identity() if width_in == width_out else nn.Linear(width_in, width_out, device=device)
