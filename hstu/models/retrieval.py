"""The HSTU retrieval model: predicts the next item by sampled softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.datasets import HSTUBatch
from commons.jagged_indices import spread
from hstu.models.embedding_tables import EmbeddingTable, collection_groups, table_dims
from hstu.models.hstu_encoder import HSTUEncoder
from hstu.models.hstu_model import HSTUModel
from hstu.models.label_tokens import keyed_labels, labeled_item_tokens
from hstu.models.sampled_softmax import sampled_softmax_loss
from hstu.modules.hstu_config import HSTUConfig, HSTUFeatures
from hstu.modules.sequence_preprocessor import projection


@dataclass(frozen=True)
class RetrievalConfig:
    """Settings of an item's score.

    Attributes:
        temperature: divisor of the product of two unit vectors.
        l2_norm_eps: lower bound of the norm that a vector is divided by.

    Raises:
        ValueError: a setting is not positive.
    """

    temperature: float = 0.05
    l2_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("temperature", "l2_norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0")


@dataclass(frozen=True)
class RetrievalOutput:
    """Query and target of each label token, sample by sample, detached.

    Attributes:
        queries: unit vectors, float32 `[num_label_tokens, item_embedding_dim]`. An item's score is a query's
            product with the item's normalized embedding, divided by the temperature.
        targets: target items, `[num_label_tokens]`.
    """

    queries: torch.Tensor
    targets: torch.Tensor


class HSTURetrieval(HSTUModel):
    """Embedding tables and HSTU layers; the state of each item predicts the next item.

    The state is read at the token of the item itself, as in recsys-examples. So it sees the actions on all
    earlier items, but not the action on this one. A sample's labels belong to its last items, and nothing
    predicts its first item.
    Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.

    Args:
        config: sizes of the model; it must be causal.
        tables: embedding tables; each feature is in exactly one, and negatives share the items' table.
        features: names of the features; retrieval needs negatives.
        retrieval: settings of an item's score.
        tables_device: device of the tables, as in `HSTUModel`.

    Raises:
        ValueError: no feature of negatives is named, or it is not in the items' table; that table is not
            sharded; the config is not causal; or the tables do not fit the features.
    """

    def __init__(
        self,
        config: HSTUConfig,
        tables: Sequence[EmbeddingTable],
        features: HSTUFeatures,
        retrieval: RetrievalConfig,
        tables_device: torch.device | None = None,
    ) -> None:
        if not config.is_causal:
            raise ValueError(
                "with is_causal=False the model sees an item before it predicts it; set is_causal=True"
            )
        super().__init__(config, tables, features, tables_device)
        self.dense = RetrievalDense(config, tables, features, retrieval)


class RetrievalDense(nn.Module):
    """Everything in `HSTURetrieval` except the sharded tables. Takes the same arguments, except the last."""

    def __init__(
        self,
        config: HSTUConfig,
        tables: Sequence[EmbeddingTable],
        features: HSTUFeatures,
        retrieval: RetrievalConfig,
    ) -> None:
        super().__init__()
        self.config = config
        self.retrieval = retrieval
        self._item = features.item
        self._negatives, self._collection = _negatives_and_collection(config, tables, features)
        self.encoder = HSTUEncoder(config, tables, features)
        self.query_projection = projection(config.hidden_size, config.item_embedding_dim)

    def forward(
        self, embeddings: Sequence[Mapping[str, JaggedTensor]], batch: HSTUBatch
    ) -> tuple[torch.Tensor, RetrievalOutput]:
        """Returns the summed loss of the batch's label tokens, a float32 scalar, and the queries.

        Targets reuse the embeddings that the sequence looked up. Scores and loss are always float32. A batch
        without tokens or labels has a loss of 0 and zero gradients for all parameters.

        Args:
            embeddings: lookups of each embedding collection, by feature name.
            batch: batch on the model's device, with labels; without negatives the loss is 0.

        Raises:
            ValueError: the batch has candidates; the labels are not a KeyedJaggedTensor with one key; a
                sample has a label for its first item; or the features disagree, see `HSTUEncoder.forward`.
        """
        if batch.max_num_candidates:
            raise ValueError(
                f"the batch has max_num_candidates = {batch.max_num_candidates}; expected 0, because "
                "retrieval predicts the items of the history"
            )
        labels = keyed_labels(batch)
        ids, looked_up = batch.features.to_dict(), embeddings[self._collection]
        counts = batch.row_counts_on_host()
        num_labels = counts["labels"].tolist()
        with self.config.autocast(batch.features.device()):
            states, structure = self.encoder(embeddings, batch, counts)
            labeled = labeled_item_tokens(structure, labels, num_labels, num_unlabeled=1)
            previous = labeled - structure.tokens_per_item
            queries = self._unit(self.query_projection(states[previous]))
        lengths, last_items = labels.lengths(), structure.looked_up_lengths.cumsum(0)
        items = spread(last_items - lengths, lengths, len(previous))
        targets = ids[self._item].values()[items]
        loss = sampled_softmax_loss(
            queries,
            self._unit(looked_up[self._item].values()[items]),
            self._unit(looked_up[self._negatives].values()),
            targets,
            ids[self._negatives].values(),
            num_labels,
            counts[f"features.{self._negatives}"].tolist(),
            self.retrieval.temperature,
        )
        return loss, RetrievalOutput(queries.detach(), targets)

    def _unit(self, vectors: torch.Tensor) -> torch.Tensor:
        return functional.normalize(vectors.float(), dim=-1, eps=self.retrieval.l2_norm_eps)


def _negatives_and_collection(
    config: HSTUConfig, tables: Sequence[EmbeddingTable], features: HSTUFeatures
) -> tuple[str, int]:
    """Returns the negatives' name, and the index of the embedding collection that has them and the items."""
    if features.negatives is None:
        raise ValueError("retrieval contrasts the target with negatives, but no such feature is named")
    dims = table_dims(tables, features.embedding_dims(config))
    item_table = next(table for table in tables if features.item in table.feature_names)
    if features.negatives not in item_table.feature_names:
        raise ValueError(
            f"negatives {features.negatives!r} are not in the items' table {item_table.name!r}; negatives "
            "are items: list both features in that table"
        )
    if not item_table.sharded:
        raise ValueError(
            f"the items' table {item_table.name!r} is replicated; retrieval ranks the rows that each rank "
            "holds: make it model_parallel"
        )
    groups = collection_groups(tables, dims)
    return features.negatives, next(index for index, group in enumerate(groups) if item_table in group)
