"""The HSTU ranking model: predicts the action on an item from the history before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.datasets import HSTUBatch
from hstu.models.action_loss import ActionLoss
from hstu.models.embedding_tables import EmbeddingTable
from hstu.models.hstu_encoder import HSTUEncoder
from hstu.models.hstu_model import HSTUModel
from hstu.models.label_tokens import keyed_labels, labeled_item_tokens
from hstu.modules.hstu_config import HSTUConfig, HSTUFeatures
from hstu.modules.prediction_head import PredictionHead, RankingHeadConfig


@dataclass(frozen=True)
class RankingOutput:
    """Predictions for the labeled items, sample by sample, detached.

    Attributes:
        logits: `[num_label_tokens, width]` float32.
        labels: `[num_label_tokens]`, the actual actions.
    """

    logits: torch.Tensor
    labels: torch.Tensor


class HSTURanking(HSTUModel):
    """Embedding tables, HSTU layers, and a head that predicts the action on each labeled item.

    The prediction is read at the item's own token, which sees the history before it but not the action.
    Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.

    Args:
        config: sizes of the model.
        tables: embedding tables; each feature is in exactly one.
        features: names of the features; ranking needs the action.
        head: the head's settings.
        tables_device: device of the tables, as in `HSTUModel`.

    Raises:
        ValueError: the action feature is missing, the tables do not fit the features, or the head's last
            width does not fit its number of tasks.
    """

    def __init__(
        self,
        config: HSTUConfig,
        tables: Sequence[EmbeddingTable],
        features: HSTUFeatures,
        head: RankingHeadConfig,
        tables_device: torch.device | None = None,
    ) -> None:
        if features.action is None:
            raise ValueError("ranking predicts actions, but no action feature is named")
        super().__init__(config, tables, features, tables_device)
        self.dense = RankingDense(config, tables, features, head)


class RankingDense(nn.Module):
    """Everything in `HSTURanking` except the sharded tables. Takes the same arguments, except the last."""

    def __init__(
        self,
        config: HSTUConfig,
        tables: Sequence[EmbeddingTable],
        features: HSTUFeatures,
        head: RankingHeadConfig,
    ) -> None:
        super().__init__()
        self.config = config
        self.encoder = HSTUEncoder(config, tables, features)
        self.head = PredictionHead(config.hidden_size, head)
        self.loss = ActionLoss(head.num_tasks, head.prediction_head_arch[-1])

    def forward(
        self, embeddings: Sequence[Mapping[str, JaggedTensor]], batch: HSTUBatch
    ) -> tuple[torch.Tensor, RankingOutput]:
        """Returns the summed loss of the batch's label tokens, a float32 scalar, and the predictions.

        A batch without tokens or labels has a loss of 0 and zero gradients for all parameters, so its rank
        stays in step with the others.

        Args:
            embeddings: lookups of each embedding collection, by feature name.
            batch: batch on the model's device, with labels.

        Raises:
            ValueError: the labels are not a KeyedJaggedTensor with one key; a sample has more labels than
                items, or a label outside the head's classes (checked on CPU only); items would see their own
                actions; samples with negatives are cut; or the features disagree, see `HSTUEncoder.forward`.
        """
        labels = keyed_labels(batch)
        if not self.config.is_causal and not batch.max_num_candidates:
            raise ValueError(
                "with is_causal=False an item of the history sees its own action, which is its label; "
                "set is_causal=True or use candidates"
            )
        if batch.pieces is not None and batch.negatives_feature_name is not None:
            raise ValueError(
                "samples with negatives are cut for retrieval, whose labels go with the token before; "
                "train ranking on batches without negatives"
            )
        counts = batch.row_counts_on_host()
        with self.config.autocast(batch.features.device()):
            states, structure = self.encoder(embeddings, batch, counts)
            labeled = labeled_item_tokens(structure, labels, counts["labels"].tolist())
            logits = self.head(states[labeled])
        logits = logits.float()
        return self.loss(logits, labels.values()), RankingOutput(logits.detach(), labels.values())
