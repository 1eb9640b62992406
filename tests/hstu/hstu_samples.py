"""Small HSTU models, and batches built sample by sample."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets import HSTUBatch
from hstu.models import EmbeddingTable, HSTUConfig, HSTUFeatures, HSTURanking, RankingHeadConfig

NUM_CLASSES = 5
VOCABULARY = 50
FEATURES = HSTUFeatures(item="item", action="action", contextual=("user", "tags"))


@dataclass(frozen=True)
class Sample:
    """Sample whose last `num_candidates` items are candidates, and whose labels belong to its last items."""

    user: list[int]
    tags: list[int]
    items: list[int]
    actions: list[int]
    num_candidates: int
    labels: list[int]


SAMPLE = Sample(
    user=[3],
    tags=[1, 2],
    items=[5, 6, 7, 8, 9, 10],
    actions=[0, 1, 2, 3, 4, 0],
    num_candidates=3,
    labels=[3, 4, 0],
)
EMPTY = Sample([], [], [], [], 0, [])


def keyed(num_rows: int, **ids: Sequence[list[int]]) -> KeyedJaggedTensor:
    """Makes jagged features of each row's ids; further rows are empty."""
    columns = [[*column, *[[]] * (num_rows - len(column))] for column in ids.values()]
    values = [value for column in columns for row in column for value in row]
    lengths = [len(row) for column in columns for row in column]
    return KeyedJaggedTensor(
        list(ids), torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths, dtype=torch.int64)
    )


def hstu_batch(rows: Sequence[Sample]) -> HSTUBatch:
    return HSTUBatch(
        features=keyed(
            len(rows),
            user=[row.user for row in rows],
            tags=[row.tags for row in rows],
            item=[row.items for row in rows],
            action=[row.actions for row in rows],
        ),
        batch_size=len(rows),
        feature_to_max_seqlen={},
        contextual_feature_names=["user", "tags"],
        labels=keyed(len(rows), label=[row.labels for row in rows]),
        item_feature_name="item",
        action_feature_name="action",
        max_num_candidates=10,
        num_candidates=torch.tensor([row.num_candidates for row in rows]),
    )


def small_config(dtype: torch.dtype, **changes: int | bool) -> HSTUConfig:
    sizes = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "kv_channels": 4,
        "scaling_seqlen": 20,
        "item_embedding_dim": 12,
        "contextual_embedding_dim": 8,
        "num_position_buckets": 32,
        "hidden_dropout": 0.0,
    }
    return HSTUConfig(**{**sizes, **changes}, dtype=dtype)


def enlarge(model: torch.nn.Module) -> None:
    """Draws parameters larger than the default, so every input shows in the outputs."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)


def ranking_model(
    head: RankingHeadConfig | None = None,
    dtype: torch.dtype = torch.float32,
    eviction: str | None = None,
    **config: int | bool,
) -> HSTURanking:
    """Makes a small model, the same at each call; with `eviction`, items and users have unbounded ids."""
    torch.manual_seed(0)
    tables = [
        EmbeddingTable("item_table", ("item",), VOCABULARY, sharded=True, eviction=eviction),
        EmbeddingTable("tag_table", ("tags",), VOCABULARY, sharded=True),
        EmbeddingTable("user_table", ("user",), VOCABULARY, sharded=eviction is not None, eviction=eviction),
        EmbeddingTable("action_table", ("action",), VOCABULARY, sharded=False),
    ]
    head = head or RankingHeadConfig((8, NUM_CLASSES))
    model = HSTURanking(small_config(dtype, **config), tables, FEATURES, head)
    enlarge(model)
    return model
