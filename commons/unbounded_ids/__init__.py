"""Embedding tables for unbounded ids, with a fixed number of rows."""

from .collection import (
    ShardedUnboundedEmbeddingCollection,
    UnboundedEmbeddingCollection,
    UnboundedEmbeddingCollectionSharder,
)
from .id_mix import NO_ID

__all__ = [
    "NO_ID",
    "ShardedUnboundedEmbeddingCollection",
    "UnboundedEmbeddingCollection",
    "UnboundedEmbeddingCollectionSharder",
]
