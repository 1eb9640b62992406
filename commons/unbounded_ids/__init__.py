"""Embedding tables for unbounded ids, in a fixed number of rows."""

from commons.unbounded_ids.collection import (
    ShardedUnboundedEmbeddingCollection,
    UnboundedEmbeddingCollection,
    UnboundedEmbeddingCollectionSharder,
)
from commons.unbounded_ids.id_mix import NO_ID

__all__ = [
    "NO_ID",
    "ShardedUnboundedEmbeddingCollection",
    "UnboundedEmbeddingCollection",
    "UnboundedEmbeddingCollectionSharder",
]
