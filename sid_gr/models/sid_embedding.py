"""Embeds codes, contextual ids, BOS, and positions as the decoder's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from commons.datasets import SIDBatch
from sid_gr.modules.token_layout import TokenLayout

_POSITION_STD = 0.02


class SIDEmbedding(nn.Module):
    """One table per hierarchy and per contextual feature, a BOS embedding, and learned positions.

    Semantic IDs come from residual quantization, where a code refines the codes before it. So a code's token
    is the sum of its item's code embeddings up to this code, and the last code's token represents the item.
    All tokens of an item, including its BOS, also add the sum of the previous item. This convolution over two
    items has no parameters, and makes transitions between items available to the first layer.

    The tables are plain modules replicated on every rank. A codebook has a few hundred rows, which is less
    than an all-to-all of lookups would move.

    Args:
        codebook_sizes: number of rows of each hierarchy's table.
        contextual_vocab_sizes: number of rows of each contextual feature's table.
        hidden_size: width of a token.
        num_position_buckets: number of positions with their own embedding; later positions share the last.
        device: device of the parameters.
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
        # A ModuleList and not a ModuleDict, because torch reserves some names.
        self._contextual_names = list(contextual_vocab_sizes)
        self.contextual = nn.ModuleList(table(size) for size in contextual_vocab_sizes.values())
        self.bos = nn.Parameter(torch.randn(1, hidden_size, device=device))
        self.positions = table(num_position_buckets)
        # Positions start small next to the codes, which carry the token's meaning.
        nn.init.normal_(self.positions.weight, std=_POSITION_STD)

    def forward(self, batch: SIDBatch, layout: TokenLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeds the tokens of a batch.

        Returns:
            The tokens, `[tokens, hidden_size]`, and the embedding of the item before each candidate,
            `[candidates, hidden_size]`.

        Raises:
            ValueError: the batch's contextual features or hierarchies differ from the model's.
        """
        num_hierarchies = len(self.codes)
        if (batch.contextual_feature_names, batch.num_hierarchies) != (
            self._contextual_names,
            num_hierarchies,
        ):
            raise ValueError(
                f"the batch has contextual features {batch.contextual_feature_names} and "
                f"{batch.num_hierarchies} hierarchies; the model has {self._contextual_names} and "
                f"{num_hierarchies}"
            )
        contextual = [
            table(layout.ids[name])
            for name, table in zip(self._contextual_names, self.contextual, strict=True)
        ]
        history = self._items(layout.ids[batch.history_feature_name])
        candidates = self._items(layout.ids[batch.candidate_feature_name])
        whole_items = torch.cat([history[:, -1], candidates[:, -1], torch.zeros_like(self.bos)])
        before = whole_items[layout.previous_items]
        before_history, before_candidates = before.split([len(history), len(candidates)])
        rows = torch.cat(
            [
                *contextual,
                (history + before_history.unsqueeze(1)).flatten(0, 1),
                (candidates + before_candidates.unsqueeze(1)).flatten(0, 1),
                self.bos + before_candidates,
            ]
        )
        return rows[layout.sources] + self.at(layout.positions), before_candidates

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of these positions, `[..., hidden_size]`."""
        return self.positions(positions.clamp(max=self.positions.num_embeddings - 1))

    def _items(self, codes: torch.Tensor) -> torch.Tensor:
        """Returns the sums up to each code, `[items, hierarchies, d]`, from `[items · hierarchies]` codes."""
        by_hierarchy = codes.view(-1, len(self.codes)).unbind(1)
        embedded = [table(column) for table, column in zip(self.codes, by_hierarchy, strict=True)]
        return torch.stack(embedded, 1).cumsum(1)
