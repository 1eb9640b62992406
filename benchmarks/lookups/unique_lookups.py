"""An embedding collection that looks up each id of a rank's batch once, on any device."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class UniqueLookups(nn.Module):
    """Looks up the unique ids of each feature in a collection, then copies the rows to all their places.

    Stands in for TorchRec's `use_index_dedup`, which has no CPU kernel. Embeddings and gradients are those of
    the collection alone, but ranks exchange one row per unique id.

    Args:
        collection: the tables; may be sharded later, in place.

    Attributes:
        collection: the tables.
        unique_ids: int64 `[unique ids]` of each feature in the last batch, ascending.
    """

    def __init__(self, collection: EmbeddingCollection) -> None:
        super().__init__()
        self.collection: nn.Module = collection
        self._features = [name for table in collection.embedding_configs() for name in table.feature_names]
        self.unique_ids: dict[str, torch.Tensor] = {}

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns the embeddings of each feature's ids, `[ids, embedding_dim]`, and its lengths."""
        looked_up = {name: features[name] for name in self._features}
        places: dict[str, torch.Tensor] = {}
        for name, of_rows in looked_up.items():
            self.unique_ids[name], places[name] = torch.unique(of_rows.values(), return_inverse=True)
        as_one_row = KeyedJaggedTensor(
            self._features,
            torch.cat([self.unique_ids[name] for name in self._features]),
            lengths=torch.tensor([len(self.unique_ids[name]) for name in self._features]),
        )
        embedded = self.collection(as_one_row)
        return {
            name: JaggedTensor(
                embedded[name].values().index_select(0, places[name]), lengths=of_rows.lengths()
            )
            for name, of_rows in looked_up.items()
        }
