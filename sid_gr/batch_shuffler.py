"""The SID-GR model's batch shuffler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from commons.datasets import SIDBatch
from commons.distributed import BatchShuffler, register_batch_shuffler
from commons.perf_model import TransformerConfig, transformer_work

if TYPE_CHECKING:
    from commons.extensions.pieces.cut_rules import CutRules


@register_batch_shuffler("sid_gr")
class SIDGRBatchShuffler(BatchShuffler):
    """Balances the FLOPs of the decoder's layers.

    Takes either `flops` or only the heads, like the shuffler of recsys-examples.

    Args:
        flops: function that takes tokens, `[batch_size]` integers, and returns forward FLOPs, `[batch_size]`
            or `[batch_size, columns]`, such as `transformer_work` of a config.
        num_heads, head_dim: number and width of the attention heads; their product is the hidden size, and
            the MLP is four times as wide. One layer is counted, because more layers scale every load alike.
        settings: settings of `BatchShuffler`.

    Raises:
        TypeError: neither `flops` nor both of `num_heads` and `head_dim` are given, or all are.
        ValueError: a size is not positive.
    """

    unit = "FLOPs"
    excludes: Mapping[str, str] = {"padded": "SID-GR runs on jagged tokens, without padding"}

    def __init__(
        self,
        flops: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        **settings: Any,
    ) -> None:
        if (flops is None) == (num_heads is None) or (num_heads is None) != (head_dim is None):
            raise TypeError(
                f'batch shuffler "sid_gr": flops = {flops}, num_heads = {num_heads}, head_dim = {head_dim}; '
                "expected either flops=, or both num_heads= and head_dim="
            )
        if num_heads is not None and head_dim is not None:
            flops = partial(transformer_work, _layer(num_heads, head_dim))
        assert flops is not None
        super().__init__(**settings)
        self._flops = flops

    def get_workloads(self, batch: SIDBatch) -> torch.Tensor:
        """Returns the forward FLOPs of each row."""
        return self._flops(batch.num_tokens())

    def prefix_cost(self, tokens: np.ndarray, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the forward FLOPs of each sample's first `tokens` tokens, which see no later ones."""
        return self._flops(torch.from_numpy(tokens)).numpy()

    @staticmethod
    def cut_rules(batch: SIDBatch) -> CutRules:
        """Returns rules that cut between items. Contextual ids go to the first piece, the target to the last.

        A piece also gets the item before its own, whose sum the tokens of its first item add.
        """
        from commons.extensions.pieces import cut_rules as of  # only cutting needs it

        codes = batch.num_hierarchies
        history = f"features.{batch.history_feature_name}"
        candidates = f"features.{batch.candidate_feature_name}"
        rules = {f"features.{name}": of.WITH_FIRST for name in batch.contextual_feature_names}
        rules |= {
            history: of.FieldRule("items", codes, before=1),
            candidates: of.FieldRule("items_from_end", codes, before=1),
            "loss_tokens": of.FieldRule("items_from_end", codes),
            "target_items": of.WITH_LAST,
        }
        return of.CutRules(
            items=(of.ItemGroup(history, codes, codes), of.ItemGroup(candidates, codes, codes + 1)),
            fields=rules,
            head=tuple(f"features.{name}" for name in batch.contextual_feature_names),
            left_out=1,
        )


def _layer(num_heads: int, head_dim: int) -> TransformerConfig:
    """Returns one decoder layer whose hidden size is the width of all its heads."""
    width = num_heads * head_dim
    return TransformerConfig(1, width, num_heads, num_heads, head_dim, 4 * width)
