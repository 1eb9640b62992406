"""The model that the lookups benchmark trains: HSTU ranking with wide embedding rows."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingCollection
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from benchmarks.lookup_streams import NUM_ACTIONS, NUM_ITEMS, NUM_USERS
from commons.perf_model import HSTUFlops
from hstu.models.embedding_tables import EmbeddingTable
from hstu.models.hstu_config import HSTUConfig
from hstu.models.hstu_encoder import HSTUFeatures
from hstu.models.ranking import HSTURanking, RankingHeadConfig

LAYERS, WIDTH, HEADS = 1, 64, 2
FLOPS = HSTUFlops(LAYERS, WIDTH, HEADS, WIDTH // HEADS)
PARTS_PER_ROW = 16
ROW_WIDTH = PARTS_PER_ROW * WIDTH


class UniqueLookups(nn.Module):
    """A module that looks up each feature's unique ids, then copies the rows to all places of their ids.

    It stands in for TorchRec's `use_index_dedup`, which has no CPU kernel. Its embeddings and gradients are
    the same as the plain collection's, but ranks exchange only one row per unique id.

    Args:
        collection: the tables, which may be sharded in place later.

    Attributes:
        collection: the tables.
        unique_ids: unique ids of each feature in the last batch, int64 `[unique ids]`, ascending.
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
        for name, rows in looked_up.items():
            self.unique_ids[name], places[name] = torch.unique(rows.values(), return_inverse=True)
        as_one_row = KeyedJaggedTensor(
            self._features,
            torch.cat([self.unique_ids[name] for name in self._features]),
            lengths=torch.tensor([len(self.unique_ids[name]) for name in self._features]),
        )
        embedded = self.collection(as_one_row)
        return {
            name: JaggedTensor(embedded[name].values().index_select(0, places[name]), lengths=rows.lengths())
            for name, rows in looked_up.items()
        }


class SummedParts(nn.Module):
    """A module that looks up wide rows, and sums their parts of `WIDTH` numbers each.

    Each part stands for the embedding of one of an item's features, such as its creator or its category.
    """

    def __init__(self, lookups: UniqueLookups) -> None:
        super().__init__()
        self.lookups = lookups

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns the embeddings of each feature's ids, `[ids, WIDTH]`."""
        summed = {}
        for name, rows in self.lookups(features).items():
            parts = rows.values().unflatten(1, (PARTS_PER_ROW, WIDTH))
            summed[name] = JaggedTensor(parts.sum(1), lengths=rows.lengths())
        return summed


def make_ranking_model() -> tuple[HSTURanking, UniqueLookups]:
    """Returns the model and its lookups. The sharded tables are on the meta device."""
    config = HSTUConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_heads=HEADS,
        head_dim=WIDTH // HEADS,
        scaling_seqlen=1024,
        hidden_dropout=0.0,
        dtype=torch.float32,
        num_position_buckets=1024,
    )
    tables = (
        EmbeddingTable("item", ("item",), NUM_ITEMS, sharded=True),
        EmbeddingTable("user", ("user_id",), NUM_USERS, sharded=True),
        EmbeddingTable("action", ("action",), NUM_ACTIONS, sharded=False),
    )
    features, head = HSTUFeatures("item", "action", ("user_id",)), RankingHeadConfig((NUM_ACTIONS,))
    model = HSTURanking(config, tables, features, head, torch.device("meta"))
    wide = EmbeddingCollection(
        [
            EmbeddingConfig(
                name=table.name,
                embedding_dim=ROW_WIDTH,
                num_embeddings=table.num_embeddings,
                feature_names=list(table.feature_names),
            )
            for table in tables
            if table.sharded
        ],
        device=torch.device("meta"),
    )
    lookups = UniqueLookups(wide)
    model.embedding_collections = nn.ModuleList([SummedParts(lookups)])
    return model, lookups
