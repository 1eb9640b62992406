"""The embedding tables of the HSTU models: large ones to be sharded, small ones in the dense part."""

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
        name: of the table.
        feature_names: features that look their ids up in it.
        num_embeddings: size of the vocabulary; ids are 0 to `num_embeddings` − 1.
        sharded: True for a table to be spread over the ranks by TorchRec, False for a small one of which
            every rank has a copy.
        eviction: "lru" or "lfu" for a sharded table of ids of any size, of which `num_embeddings` fit in at
            a time and the least recently or least frequently used go; None for an ordinary one.
    """

    name: str
    feature_names: tuple[str, ...]
    num_embeddings: int
    sharded: bool
    eviction: str | None = None


def table_dims(tables: Sequence[EmbeddingTable], feature_dims: Mapping[str, int]) -> dict[str, int]:
    """The embedding width of each table by name, from the width of each feature by name.

    Raises:
        ValueError: a feature is in no table, in two tables, or in a table but not in the model; a table's
            features differ in width; two tables have one name; a table's name cannot be a module's; or one
            that evicts is not sharded.
    """
    dims: dict[str, int] = {}
    table_of: dict[str, str] = {}
    for table in tables:
        if table.name in dims:
            raise ValueError(f"two embedding tables are named {table.name!r}")
        if "." in table.name or hasattr(nn.ModuleDict, table.name):
            raise ValueError(f"an embedding table cannot be named {table.name!r}: torch keeps that name")
        if table.eviction is not None and not table.sharded:
            raise ValueError(f"table {table.name!r} is replicated; one that evicts has to be sharded")
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
    """The sharded tables of each embedding collection: those of one width that all evict, or all do not.

    Ordinary tables come first, in rising order of width; `dims` is each table's width by name.
    """
    groups: dict[tuple[bool, int], list[EmbeddingTable]] = {}
    for table in tables:
        if table.sharded:
            groups.setdefault((table.eviction is not None, dims[table.name]), []).append(table)
    return [groups[key] for key in sorted(groups)]


def embedding_collections(
    tables: Sequence[EmbeddingTable], dims: Mapping[str, int], device: torch.device | None
) -> nn.ModuleList:
    """A TorchRec EmbeddingCollection per group of `collection_groups`, or one of unbounded ids."""
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
    """The tables that every rank has a copy of; DistributedDataParallel keeps the copies equal.

    They are plain modules because TorchRec's data-parallel sharding has no CPU kernel for unpooled lookups.
    `dims` is the width of each table by name.
    """

    def __init__(
        self, tables: Sequence[EmbeddingTable], dims: Mapping[str, int], device: torch.device | None
    ) -> None:
        super().__init__()
        small = [table for table in tables if not table.sharded]
        self.tables = nn.ModuleDict(
            {
                table.name: nn.Embedding(table.num_embeddings, dims[table.name], device=device)
                for table in small
            }
        )
        self._table_of = {feature: table.name for table in small for feature in table.feature_names}
        for embedding in self.tables.values():
            nn.init.normal_(embedding.get_parameter("weight"), std=_SMALL_TABLE_STD)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """By feature name, embeddings `[num_ids of the feature, embedding_dim]` of the features it has.

        Features on CUDA whose lengths per key were not worked out on the host cost a synchronisation.
        """
        ids = features.to_dict()
        return {
            feature: JaggedTensor(
                values=self.tables[table](ids[feature].values()), lengths=ids[feature].lengths()
            )
            for feature, table in self._table_of.items()
        }
