"""From ids to the decoder's input: codes, contextual ids, BOS and positions embedded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from commons.datasets import SIDBatch
from sid_gr.modules.token_layout import TokenLayout

_POSITION_STD = 0.02


class SIDEmbedding(nn.Module):
    """An embedding table per hierarchy and per contextual feature, BOS, and learned positions.

    The tables are plain modules, of which DistributedDataParallel keeps a copy on every rank: a codebook has
    some hundreds of rows, less than what an all-to-all of lookups would move.

    Args:
        codebook_sizes: rows of each hierarchy's table.
        contextual_vocab_sizes: rows of each contextual feature's table.
        hidden_size: width of a token.
        num_position_buckets: positions that have an embedding of their own; later ones share the last.
        device: of the parameters.
    """

    def __init__(
        self,
        codebook_sizes: Sequence[int],
        contextual_vocab_sizes: Mapping[str, int],
        hidden_size: int,
        num_position_buckets: int,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()

        def table(rows: int) -> nn.Embedding:
            return nn.Embedding(rows, hidden_size, device=device)

        self.codes = nn.ModuleList(table(size) for size in codebook_sizes)
        # In order, not by name: a feature's name may be one that torch keeps for itself.
        self._contextual_names = list(contextual_vocab_sizes)
        self.contextual = nn.ModuleList(table(size) for size in contextual_vocab_sizes.values())
        self.bos = nn.Parameter(torch.randn(1, hidden_size, device=device))
        self.positions = table(num_position_buckets)
        # Small beside the codes, which say what a token is.
        nn.init.normal_(self.positions.weight, std=_POSITION_STD)

    def forward(self, batch: SIDBatch, layout: TokenLayout) -> torch.Tensor:
        """`[total_tokens, hidden_size]`: all tokens of a batch.

        Raises:
            ValueError: the batch's contextual features or hierarchies are other ones.
        """
        if batch.contextual_feature_names != self._contextual_names or batch.num_hierarchies != len(
            self.codes
        ):
            raise ValueError(
                f"the batch has contextual features {batch.contextual_feature_names} and "
                f"{batch.num_hierarchies} hierarchies; the model has {self._contextual_names} and "
                f"{len(self.codes)}"
            )
        rows = [
            table(layout.ids[name])
            for name, table in zip(self._contextual_names, self.contextual, strict=True)
        ]
        rows += [
            self._items(layout.ids[name])
            for name in (batch.history_feature_name, batch.candidate_feature_name)
        ]
        return torch.cat([*rows, self.bos])[layout.sources] + self._positions(layout.positions)

    def extend(self, codes: torch.Tensor, hierarchy: int, positions: torch.Tensor) -> torch.Tensor:
        """`[..., hidden_size]`: tokens of one hierarchy's codes, at these positions."""
        return self.codes[hierarchy](codes) + self._positions(positions)

    def _items(self, codes: torch.Tensor) -> torch.Tensor:
        """Whole items' codes `[items · hierarchies]`, one table for each in turn."""
        by_hierarchy = codes.view(-1, len(self.codes)).unbind(1)
        embedded = [table(column) for table, column in zip(self.codes, by_hierarchy, strict=True)]
        return torch.stack(embedded, 1).flatten(0, 1)

    def _positions(self, positions: torch.Tensor) -> torch.Tensor:
        return self.positions(positions.clamp(max=self.positions.num_embeddings - 1))
