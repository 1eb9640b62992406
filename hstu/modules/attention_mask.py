"""Attention mask of one sample, computed from indices."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SampleMask:
    """Attention mask of one sample: contextual tokens, then history, then candidates.

    Token r sees the tokens before `prefix_end(r)`, and those from the start of its own candidate up to
    itself. So contextual tokens all see each other, the history is causal, and a candidate sees everything
    before the candidates and itself, but no other candidate.

    Attributes:
        num_tokens: tokens of the sample, T.
        num_contextual: leading tokens that all see each other; 0 makes them causal too.
        history_end: index of the first candidate token; T if there are no candidates.
        tokens_per_candidate: 2 for an item and its action, 1 for an item alone.
        is_causal: False lets contextual and history tokens all see each other.
    """

    num_tokens: int
    num_contextual: int
    history_end: int
    tokens_per_candidate: int
    is_causal: bool

    def visible(self, first_row: int, last_row: int, device: torch.device) -> tuple[int, torch.Tensor]:
        """Returns the mask of rows `first_row` to `last_row`, exclusive.

        Returns:
            `first_column`, before which all these rows see everything, and a bool tensor
            `[last_row - first_row, num_tokens - first_column]`, True where a row sees a column.
        """
        # prefix_end never decreases from row to row, so the first row's holds for the whole block.
        first_column = self._prefix_end_of_row(first_row)
        rows = torch.arange(first_row, last_row, device=device).unsqueeze(1)
        columns = torch.arange(first_column, self.num_tokens, device=device)
        if last_row <= self.history_end:
            return first_column, columns < self._prefix_end(rows)
        past_history = rows - self.history_end
        # For a row in the history, this gives columns up to the row itself, which it sees anyway.
        own_start = rows - past_history % self.tokens_per_candidate
        own = (columns >= own_start) & (columns <= rows)
        return first_column, own | (columns < self._prefix_end(rows))

    def _prefix_end(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.is_causal:
            return torch.full_like(rows, self.history_end)
        return (rows + 1).clamp(self.num_contextual, self.history_end)

    def _prefix_end_of_row(self, row: int) -> int:
        if not self.is_causal:
            return self.history_end
        return min(max(row + 1, self.num_contextual), self.history_end)
