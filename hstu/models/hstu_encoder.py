"""The encoder shared by all HSTU models: turns embedded features into one state per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.datasets import HSTUBatch
from hstu.models.embedding_tables import EmbeddingTable, SmallTables, collection_groups, table_dims
from hstu.modules.attention_backend import Attention, batch_attention
from hstu.modules.hstu_config import HSTUConfig, HSTUFeatures
from hstu.modules.hstu_layer import HSTULayer
from hstu.modules.piecewise_attention import PiecewiseAttention
from hstu.modules.sequence_preprocessor import SequencePreprocessor
from hstu.modules.sequence_structure import SequenceStructure

if TYPE_CHECKING:
    from commons.extensions.pieces import PlacedPieces


class HSTUEncoder(nn.Module):
    """Small tables, preprocessor, HSTU layers, and final layer norm: all except the sharded tables.

    Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.
    """

    def __init__(self, config: HSTUConfig, tables: Sequence[EmbeddingTable], features: HSTUFeatures) -> None:
        super().__init__()
        self.config = config
        dims = table_dims(tables, features.embedding_dims(config))
        self.small_tables = SmallTables(tables, dims)
        self._collection_features = [
            [name for table in group for name in table.feature_names]
            for group in collection_groups(tables, dims)
        ]
        self.preprocessor = SequencePreprocessor(config, features)
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)

    def forward(
        self,
        embeddings: Sequence[Mapping[str, JaggedTensor]],
        batch: HSTUBatch,
        counts: Mapping[str, np.ndarray],
    ) -> tuple[torch.Tensor, SequenceStructure]:
        """Returns the state of every token, `[total_tokens, hidden_size]`, and the layout of the tokens.

        An exchanged batch needs no host-device synchronization.

        Args:
            embeddings: lookups of each embedding collection, by feature name.
            batch: batch on the model's device.
            counts: result of the batch's `row_counts_on_host`.

        Raises:
            ValueError: a sample has unequal numbers of items and actions, or more candidates than items.
        """
        embedded = self.small_tables(batch.features)
        for looked_up, names in zip(embeddings, self._collection_features, strict=True):
            embedded.update({name: looked_up[name] for name in names})
        pieces = None if batch.pieces is None else batch.pieces.rows
        tokens, structure = self.preprocessor(embedded, batch.num_candidates, counts, pieces)
        attention = self._attention(structure, batch.pieces, tokens.device)
        for layer in self.layers:
            tokens = layer(tokens, attention)
        return self.final_norm(tokens), structure

    def _attention(
        self, structure: SequenceStructure, pieces: PlacedPieces | None, device: torch.device
    ) -> Attention:
        config = self.config
        masks = structure.masks(config.is_causal, config.disable_contextual_mask)
        if pieces is None:
            return batch_attention(config.kernel_backend, masks, config.scaling_seqlen, device)
        return PiecewiseAttention(config.kernel_backend, masks, pieces, config.scaling_seqlen, device)
