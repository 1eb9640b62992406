"""Small retrieval models, and batches built sample by sample."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from commons.datasets import HSTUBatch
from hstu.models import EmbeddingTable, HSTUFeatures, HSTURetrieval, RetrievalConfig
from tests.hstu.hstu_samples import VOCABULARY, enlarge, keyed, small_config

NUM_ACTIONS = 5
TEMPERATURE = 0.2


@dataclass(frozen=True)
class Sample:
    """Sample whose last `num_labels` items have labels; all but the first if None."""

    items: list[int] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    negatives: list[int] = field(default_factory=list)
    user: list[int] = field(default_factory=list)
    num_labels: int | None = None

    @property
    def labels(self) -> list[int]:
        number = max(len(self.items) - 1, 0) if self.num_labels is None else self.num_labels
        return self.items[len(self.items) - number :]


def retrieval_batch(rows: Sequence[Sample], num_padding: int = 0, with_actions: bool = True) -> HSTUBatch:
    num_rows = len(rows) + num_padding
    actions = {"action": [row.actions for row in rows]} if with_actions else {}
    return HSTUBatch(
        features=keyed(
            num_rows,
            user=[row.user for row in rows],
            item=[row.items for row in rows],
            **actions,
            negative=[row.negatives for row in rows],
        ),
        batch_size=num_rows,
        feature_to_max_seqlen={},
        contextual_feature_names=["user"],
        labels=keyed(num_rows, label=[row.labels for row in rows]),
        actual_batch_size=len(rows),
        item_feature_name="item",
        action_feature_name="action" if with_actions else None,
        negatives_feature_name="negative",
    )


def retrieval_model(
    dtype: torch.dtype = torch.float32,
    with_actions: bool = True,
    item_embedding_dim: int = 12,
    eviction: str | None = None,
) -> HSTURetrieval:
    """Makes a small model, the same at each call; with `eviction`, items have unbounded ids."""
    torch.manual_seed(0)
    actions = [EmbeddingTable("action_table", ("action",), NUM_ACTIONS, sharded=False)]
    model = HSTURetrieval(
        config=small_config(dtype, item_embedding_dim=item_embedding_dim),
        tables=[
            EmbeddingTable("item_table", ("item", "negative"), VOCABULARY, sharded=True, eviction=eviction),
            EmbeddingTable("user_table", ("user",), VOCABULARY, sharded=True),
            *(actions if with_actions else []),
        ],
        features=HSTUFeatures("item", "action" if with_actions else None, ("user",), "negative"),
        retrieval=RetrievalConfig(temperature=TEMPERATURE),
    )
    enlarge(model)
    return model


def item_vectors(model: HSTURetrieval) -> torch.Tensor:
    """Returns the items' embeddings, `[VOCABULARY, item_embedding_dim]`."""
    weights = [
        weight for name, weight in model.embedding_collections.named_parameters() if "item_table" in name
    ]
    return weights[0].detach()
