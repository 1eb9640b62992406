"""Attention mask of one sample, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def prefix(self) -> int:
        """Leading tokens that all see each other."""
        return min(self.num_contextual, self.history_end) if self.is_causal else self.history_end

    def prefix_end(self, row: int) -> int:
        """Returns the first token that a row need not see; it never decreases from row to row."""
        return min(max(row + 1, self.prefix), self.history_end)

    def is_plain(self, first_row: int, last_row: int) -> bool:
        """Returns whether each row up to `last_row`, exclusive, sees all up to itself and no more."""
        return self.prefix <= first_row + 1 and min(last_row, self.num_tokens) <= self.history_end
