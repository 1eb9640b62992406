"""The attention mask of one sample, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class SampleMask:
    """The attention mask of one sample: contextual tokens, then history, then candidates.

    Token r sees the tokens before `prefix_end(r)`, and the tokens from the start of its own candidate up to
    itself. So contextual tokens all see each other, the history is causal, and a candidate sees itself and
    everything before the candidates, but no other candidate.

    The queries may be a piece of the sample, which is a run of its tokens. All rules count tokens from the
    sample's start.

    Attributes:
        num_tokens: number of tokens in the sample, T; for a piece, only up to the last that its queries see.
        num_contextual: number of leading tokens that all see each other; 0 makes them causal, too.
        history_end: index of the first candidate token; T if there are no candidates.
        tokens_per_candidate: 2 for an item and its action, 1 for an item without an action.
        is_causal: whether the history is causal. False lets contextual and history tokens all see each other.
        first_row: index of the sample's first token that is a query.
        num_rows: number of queries; -1 becomes `num_tokens - first_row`.

    Raises:
        ValueError: the queries are not among the tokens.
    """

    num_tokens: int
    num_contextual: int
    history_end: int
    tokens_per_candidate: int
    is_causal: bool
    first_row: int = 0
    num_rows: int = -1

    def __post_init__(self) -> None:
        if self.num_rows == -1:
            object.__setattr__(self, "num_rows", self.num_tokens - self.first_row)
        if not 0 <= self.first_row <= self.end_row <= self.num_tokens:
            raise ValueError(
                f"queries {self.first_row} to {self.end_row}, exclusive, are not within the sample's "
                f"{self.num_tokens} tokens"
            )

    @property
    def end_row(self) -> int:
        """Index of the first token after the queries."""
        return self.first_row + self.num_rows

    @property
    def prefix(self) -> int:
        """Number of leading tokens that all see each other."""
        return min(self.num_contextual, self.history_end) if self.is_causal else self.history_end

    def prefix_end(self, row: int) -> int:
        """Returns the end of the leading tokens that a row sees; it never decreases from row to row."""
        return min(max(row + 1, self.prefix), self.history_end)

    def is_plain(self, first_row: int, last_row: int) -> bool:
        """Returns whether rows `first_row` to `last_row`, exclusive, see all up to themselves and no more."""
        return self.prefix <= first_row + 1 and min(last_row, self.num_tokens) <= self.history_end


def consecutive_starts(masks: Sequence[SampleMask]) -> list[int]:
    """Returns the index of each mask's first query if all queries are concatenated in order."""
    return [0, *accumulate(mask.num_rows for mask in masks)][:-1]
