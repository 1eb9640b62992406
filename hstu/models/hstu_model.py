"""Base class of the HSTU models: sharded tables and a dense part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from commons.datasets import HSTUBatch
from hstu.models.embedding_tables import EmbeddingTable, embedding_collections, table_dims
from hstu.modules.hstu_config import HSTUConfig, HSTUFeatures


class HSTUModel(nn.Module):
    """The sharded tables. A subclass adds `dense`, which turns their lookups into loss and output.

    Args:
        config: sizes of the model.
        tables: embedding tables; each feature is in exactly one.
        features: names of the features.
        tables_device: device of the sharded tables. On the meta device they take no memory until
            `shard_model` creates each rank's rows.

    Raises:
        ValueError: the tables do not fit the features.
    """

    dense: nn.Module

    def __init__(
        self,
        config: HSTUConfig,
        tables: Sequence[EmbeddingTable],
        features: HSTUFeatures,
        tables_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        dims = table_dims(tables, features.embedding_dims(config))
        self.embedding_collections = embedding_collections(tables, dims, tables_device)

    def forward(self, batch: HSTUBatch) -> tuple[torch.Tensor, Any]:
        """Returns the summed loss of the batch's label tokens, a float32 scalar, and the dense part's output.

        TorchRec's pipeline traces this method to find the lookups it can start early. So the method may only
        call embedding collections on the batch's own features, and one dense module on the results.

        Raises:
            ValueError: the batch does not fit the dense part; see its `forward`.
        """
        embeddings = [collection(batch.features) for collection in self.embedding_collections]
        return self.dense(embeddings, batch)
