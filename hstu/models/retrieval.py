"""The HSTU retrieval model: predicts the next item by sampled softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.datasets import HSTUBatch
from commons.sequence_batch.jagged_indices import spread
from hstu.models.embedding_tables import EmbeddingTable, collection_groups, table_dims
from hstu.models.hstu_config import HSTUConfig
from hstu.models.hstu_encoder import HSTUEncoder, HSTUFeatures
from hstu.models.hstu_model import HSTUModel
from hstu.models.label_tokens import keyed_labels, labelled_item_tokens
from hstu.models.sampled_softmax import sampled_softmax_loss
from hstu.modules.sequence_preprocessor import projection


@dataclass(frozen=True)
class RetrievalConfig:
    """How an item is scored.

    Attributes:
        temperature: what the product of two vectors of length 1 is divided by.
        l2_norm_eps: smallest length that a vector is divided by.

    Raises:
        ValueError: one of them is not positive.
    """

    temperature: float = 0.05
    l2_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("temperature", "l2_norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0")


@dataclass(frozen=True)
class RetrievalOutput:
    """What the model looks for at each label token, sample by sample, detached.

    Attributes:
        queries: `[num_label_tokens, item_embedding_dim]` float32 of length 1: an item's score is the
            product with its embedding, made as long, ÷ temperature.
        targets: `[num_label_tokens]`, the items that are right.
    """

    queries: torch.Tensor
    targets: torch.Tensor


class HSTURetrieval(HSTUModel):
    """Embedding tables and HSTU layers, whose state before each labelled item predicts that item.

    The state is read at the token right before the item's: the action on the previous item, or without
    actions that item. It sees both, and nothing of what comes after. A sample's labels belong to its
    last items; its first item has nothing to be predicted from.
    Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.

    Args:
        config: sizes of the model; causal.
        tables: embedding tables; each feature is in exactly one, negatives in the items'.
        features: names of the features; retrieval needs negatives.
        retrieval: how an item is scored.
        device: of the parameters.

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
        device: torch.device | None = None,
    ) -> None:
        if not config.is_causal:
            raise ValueError(
                "with is_causal=False an item is seen before it is predicted: set is_causal=True"
            )
        super().__init__(config, tables, features, device)
        self.dense = RetrievalDense(config, tables, features, retrieval, device)


class RetrievalDense(nn.Module):
    """All of `HSTURetrieval` but the sharded tables; its arguments are those of `HSTURetrieval`."""

    def __init__(
        self,
        config: HSTUConfig,
        tables: Sequence[EmbeddingTable],
        features: HSTUFeatures,
        retrieval: RetrievalConfig,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.retrieval = retrieval
        self._item = features.item
        self._negatives, self._collection = _negatives_and_collection(config, tables, features)
        self.encoder = HSTUEncoder(config, tables, features, device)
        self.query_projection = projection(config.hidden_size, config.item_embedding_dim, device)

    def forward(
        self, embeddings: Sequence[Mapping[str, JaggedTensor]], batch: HSTUBatch
    ) -> tuple[torch.Tensor, RetrievalOutput]:
        """The summed loss of the batch's label tokens, a float32 scalar, and the queries.

        The right items' embeddings are those of the sequence itself. Scores and loss are float32
        whatever the config's type. A batch without tokens or without labels has a loss of 0 and zero
        gradients for all parameters. Costs a host-device synchronisation, for the numbers of labels and
        negatives, beside the encoder's.

        Args:
            embeddings: what each embedding collection looked up, by feature name.
            batch: on the device of the model, with labels; without negatives the loss is 0.

        Raises:
            ValueError: the batch has candidates; the labels are no KeyedJaggedTensor of one key; a
                sample has a label for its first item (checked on a CPU only); or the features disagree,
                as `HSTUEncoder.forward` says.
        """
        if batch.max_num_candidates:
            raise ValueError(
                f"the batch has max_num_candidates = {batch.max_num_candidates}; expected 0, because "
                "retrieval predicts the items of the history"
            )
        labels = keyed_labels(batch)
        ids, looked_up = batch.features.to_dict(), embeddings[self._collection]
        with self.config.autocast(batch.features.device()):
            states, structure = self.encoder(embeddings, batch)
            before = labelled_item_tokens(structure, labels, num_unlabelled=1) - 1
            queries = self._unit(self.query_projection(states[before]))
        lengths, last_items = labels.lengths(), structure.item_lengths.cumsum(0)
        items = spread(last_items - lengths, lengths, len(before))
        targets = ids[self._item].values()[items]
        num_labels, num_negatives = torch.stack(
            [lengths.long(), ids[self._negatives].lengths().long()]
        ).tolist()
        loss = sampled_softmax_loss(
            queries,
            self._unit(looked_up[self._item].values()[items]),
            self._unit(looked_up[self._negatives].values()),
            targets,
            ids[self._negatives].values(),
            num_labels,
            num_negatives,
            self.retrieval.temperature,
        )
        return loss, RetrievalOutput(queries.detach(), targets)

    def _unit(self, vectors: torch.Tensor) -> torch.Tensor:
        return functional.normalize(vectors.float(), dim=-1, eps=self.retrieval.l2_norm_eps)


def _negatives_and_collection(
    config: HSTUConfig, tables: Sequence[EmbeddingTable], features: HSTUFeatures
) -> tuple[str, int]:
    """The negatives' name, and the number of the embedding collection that has them and the items."""
    if features.negatives is None:
        raise ValueError("retrieval tells the right item from negatives, but no such feature is named")
    dims = table_dims(tables, features.embedding_dims(config))
    of_items = next(table for table in tables if features.item in table.feature_names)
    if features.negatives not in of_items.feature_names:
        raise ValueError(
            f"negatives {features.negatives!r} are not in the items' table {of_items.name!r}; negatives "
            "are items: name both in that table"
        )
    if not of_items.sharded:
        raise ValueError(
            f"the items' table {of_items.name!r} is replicated; retrieval ranks the rows that each rank "
            "holds: make it model_parallel"
        )
    groups = collection_groups(tables, dims)
    return features.negatives, next(index for index, group in enumerate(groups) if of_items in group)
