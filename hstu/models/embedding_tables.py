"""Embedding tables of the HSTU models: large ones are sharded, small ones belong to the dense part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.unbounded_ids import UnboundedEmbeddingCollection

_SMALL_TABLE_STD = 0.02


@dataclass(frozen=True)
class EmbeddingTable:
    """One embedding table.

    Attributes:
        name: name of the table.
        feature_names: features that look up their ids in the table.
        num_embeddings: size of the vocabulary; ids are 0 to `num_embeddings` − 1.
        sharded: whether TorchRec spreads the table over the ranks. False is for a small table replicated on
            every rank.
        eviction: "lru" or "lfu" for a sharded table of unbounded ids, which holds `num_embeddings` ids at a
            time and evicts the least recently or least frequently used ones. None for an ordinary table.
    """

    name: str
    feature_names: tuple[str, ...]
    num_embeddings: int
    sharded: bool
    eviction: str | None = None


def table_dims(tables: Sequence[EmbeddingTable], feature_dims: Mapping[str, int]) -> dict[str, int]:
    """Returns the embedding width of each table by name, from the width of each feature by name.

    Raises:
        ValueError: a feature is in no table, in two tables, or in a table but not in the model; a table's
            features differ in width; two tables share a name; a name is not valid for a module; or a table
            that evicts is not sharded.
    """
    dims: dict[str, int] = {}
    table_of: dict[str, str] = {}
    for table in tables:
        if table.name in dims:
            raise ValueError(f"two embedding tables are named {table.name!r}")
        if "." in table.name or hasattr(nn.ModuleDict, table.name):
            raise ValueError(f"an embedding table cannot be named {table.name!r}: torch reserves that name")
        if table.eviction is not None and not table.sharded:
            raise ValueError(f"table {table.name!r} is replicated; a table that evicts must be sharded")
        for feature in table.feature_names:
            if feature not in feature_dims:
                raise ValueError(
                    f"table {table.name!r} has feature {feature!r}; the model has {sorted(feature_dims)}"
                )
            if feature in table_of:
                raise ValueError(f"feature {feature!r} is in tables {table_of[feature]!r} and {table.name!r}")
            table_of[feature] = table.name
        widths = {feature_dims[feature] for feature in table.feature_names}
        if len(widths) != 1:
            raise ValueError(
                f"table {table.name!r} has features of widths {sorted(widths)}; expected one width"
            )
        dims[table.name] = widths.pop()
    missing = sorted(set(feature_dims) - set(table_of))
    if missing:
        raise ValueError(f"no embedding table has the features {missing}")
    return dims


def collection_groups(
    tables: Sequence[EmbeddingTable], dims: Mapping[str, int]
) -> list[list[EmbeddingTable]]:
    """Groups the sharded tables into embedding collections, by width and by whether they evict.

    Ordinary tables come first, in ascending order of width. `dims` is the width of each table by name.
    """
    groups: dict[tuple[bool, int], list[EmbeddingTable]] = {}
    for table in tables:
        if table.sharded:
            groups.setdefault((table.eviction is not None, dims[table.name]), []).append(table)
    return [groups[key] for key in sorted(groups)]


def embedding_collections(
    tables: Sequence[EmbeddingTable], dims: Mapping[str, int], device: torch.device | None
) -> nn.ModuleList:
    """Returns one embedding collection per group of `collection_groups`, for unbounded ids if it evicts."""
    return nn.ModuleList(
        _embedding_collection(group, dims, device) for group in collection_groups(tables, dims)
    )


def _embedding_collection(
    group: Sequence[EmbeddingTable], dims: Mapping[str, int], device: torch.device | None
) -> nn.Module:
    configs = [
        EmbeddingConfig(
            name=table.name,
            embedding_dim=dims[table.name],
            num_embeddings=table.num_embeddings,
            feature_names=list(table.feature_names),
        )
        for table in group
    ]
    eviction = {table.name: table.eviction for table in group if table.eviction is not None}
    if eviction:
        return UnboundedEmbeddingCollection(configs, eviction, device)
    return EmbeddingCollection(tables=configs, device=device)


class SmallTables(nn.Module):
    """The tables replicated on every rank; DistributedDataParallel keeps the copies equal.

    They are plain modules, because TorchRec's data-parallel sharding has no CPU kernel for unpooled lookups.
    `dims` is the width of each table by name.
    """

    def __init__(self, tables: Sequence[EmbeddingTable], dims: Mapping[str, int]) -> None:
        super().__init__()
        small = [table for table in tables if not table.sharded]
        self.tables = nn.ModuleDict(
            {table.name: nn.Embedding(table.num_embeddings, dims[table.name]) for table in small}
        )
        self._table_of = {feature: table.name for table in small for feature in table.feature_names}
        for embedding in self.tables.values():
            nn.init.normal_(embedding.get_parameter("weight"), std=_SMALL_TABLE_STD)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns embeddings `[num_ids of the feature, embedding_dim]` by feature name.

        Synchronizes host and device if the features are on CUDA and do not know their totals per key.
        Features of an exchanged batch know them.
        """
        ids = features.to_dict()
        return {
            feature: JaggedTensor(
                values=self.tables[table](ids[feature].values()), lengths=ids[feature].lengths()
            )
            for feature, table in self._table_of.items()
        }
