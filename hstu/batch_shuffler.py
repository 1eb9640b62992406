"""The HSTU models' batch shuffler."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from commons.datasets import HSTUBatch
from commons.distributed import BatchShuffler, register_batch_shuffler
from commons.perf_model import HSTUFlops

if TYPE_CHECKING:
    from commons.extensions.pieces.cut_rules import CutRules

logger = logging.getLogger(__name__)


@register_batch_shuffler("hstu")
class HSTUBatchShuffler(BatchShuffler):
    """Balances the FLOPs of the HSTU layers, with one column for matrix products and one for attention.

    Takes either `flops` or only the heads, like the shuffler of recsys-examples. Tokens are always counted
    from the batch, which knows whether its items have actions.

    Args:
        flops: cost of the layers.
        num_heads, head_dim: number and width of the attention heads; their product is the hidden size. One
            layer is counted, because more layers scale every load alike.
        action_interleaved: flag of recsys-examples' shuffler. False has no effect and logs a warning.
        settings: settings of `BatchShuffler`.

    Raises:
        TypeError: neither `flops` nor both of `num_heads` and `head_dim` are given, or all are.
        ValueError: a size is not positive.
    """

    unit = "FLOPs"
    excludes: Mapping[str, str] = {"padded": "HSTU runs on jagged tokens, without padding"}

    def __init__(
        self,
        flops: HSTUFlops | None = None,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        action_interleaved: bool = True,
        **settings: Any,
    ) -> None:
        if (flops is None) == (num_heads is None) or (num_heads is None) != (head_dim is None):
            raise TypeError(
                f'batch shuffler "hstu": flops = {flops}, num_heads = {num_heads}, head_dim = {head_dim}; '
                "expected either flops=HSTUFlops(...), or both num_heads= and head_dim="
            )
        if num_heads is not None and head_dim is not None:
            flops = HSTUFlops(1, num_heads * head_dim, num_heads, head_dim)
        assert flops is not None
        super().__init__(**settings)
        self._flops = flops
        if not action_interleaved and self.group.rank == 0:
            logger.warning(
                'batch shuffler "hstu": action_interleaved = False has no effect: tokens are counted from '
                "the batch, actions included where it has them"
            )

    def get_workloads(self, batch: HSTUBatch) -> torch.Tensor:
        """Returns the forward FLOPs of each row, `[batch_size, 2]`."""
        return flops_of_rows(self._flops, batch)

    def prefix_cost(self, tokens: np.ndarray, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the forward FLOPs of the queries of each sample's first `tokens` tokens, `[cuts, 2]`."""
        return self._flops.prefix_work(tokens, counts["tokens"], counts["head_tokens"], counts["kept_tokens"])

    @staticmethod
    def cut_rules(batch: HSTUBatch) -> CutRules:
        """Returns rules that cut between items. The first piece gets contextual ids, the last the candidates.

        A model with negatives scores each token against the next item. In a batch with negatives, a piece
        therefore also gets the item after its own items, and its labels are shifted by one item as well.
        """
        from commons.extensions.pieces import cut_rules as of  # only cutting needs it

        ahead = int(batch.negatives_feature_name is not None)
        items, labels = of.FieldRule("items", after=ahead), of.FieldRule("items_from_end", 1, -ahead, ahead)
        rules = {f"features.{name}": of.WITH_FIRST for name in batch.contextual_feature_names}
        rules |= {f"features.{batch.item_feature_name}": items, "labels": labels, "loss_tokens": labels}
        if batch.action_feature_name is not None:
            rules[f"features.{batch.action_feature_name}"] = of.ALONG_ITEMS
        if batch.negatives_feature_name is not None:
            rules[f"features.{batch.negatives_feature_name}"] = of.TO_EVERY
        if batch.num_candidates is not None:
            rules["num_candidates"] = of.WITH_LAST
        tokens_per_item = 1 if batch.action_feature_name is None else 2
        return of.CutRules(
            items=(of.ItemGroup(f"features.{batch.item_feature_name}", tokens=tokens_per_item),),
            fields=rules,
            head=tuple(f"features.{name}" for name in batch.contextual_feature_names),
            kept_together="" if batch.num_candidates is None else "num_candidates",
        )


def flops_of_rows(flops: HSTUFlops, batch: HSTUBatch) -> torch.Tensor:
    """Returns the forward FLOPs of each row of a batch, `[batch_size, 2]` int64, as `HSTUFlops.work` does."""
    return flops.work(batch.num_tokens(), batch.num_contextual_tokens(), batch.num_candidate_tokens())
