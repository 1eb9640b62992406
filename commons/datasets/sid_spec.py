"""What a model must know of a dataset of semantic IDs to size itself."""

from __future__ import annotations

from dataclasses import dataclass, field

HISTORY, CANDIDATE = "history", "candidate"


@dataclass(frozen=True)
class SIDDatasetSpec:
    """The codes and lengths of a dataset of semantic IDs.

    Attributes:
        codebook_sizes: codes of hierarchy h are 0 to `codebook_sizes[h]`, exclusive.
        max_history_length: the most items before the candidates that a sample keeps, the newest; at least 1.
            Where all items are candidates, the most before the target.
        max_candidate_length: how many of a sample's newest items the loss is on, 1 for the target alone; 0
            means all of them.
        contextual_vocab_sizes: of each feature that describes the user, the number of ids.

    Raises:
        ValueError: there is no codebook, or a value is out of range.
    """

    codebook_sizes: tuple[int, ...]
    max_history_length: int
    max_candidate_length: int = 1
    contextual_vocab_sizes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.codebook_sizes or min(self.codebook_sizes) < 1:
            raise ValueError(f"codebook_sizes = {self.codebook_sizes}: expected positive sizes, at least one")
        if self.max_history_length < 1:
            raise ValueError(f"max_history_length = {self.max_history_length}: expected at least 1")
        if self.max_candidate_length < 0:
            raise ValueError(
                f"max_candidate_length = {self.max_candidate_length}: expected 0, for a loss on the whole "
                "history, or the number of newest items that the loss is on"
            )
        for name, size in self.contextual_vocab_sizes.items():
            if size < 1 or name in (HISTORY, CANDIDATE):
                raise ValueError(
                    f"contextual feature {name!r} has {size} ids: expected at least 1, and a name other than "
                    f"{HISTORY!r} and {CANDIDATE!r}"
                )

    @property
    def num_hierarchies(self) -> int:
        """Codes per item."""
        return len(self.codebook_sizes)

    @property
    def max_items(self) -> int:
        """The most items of a sample, candidates included."""
        return self.max_history_length + max(self.max_candidate_length, 1)

    @property
    def max_candidates(self) -> int:
        """The most candidates of a sample."""
        return self.max_candidate_length or self.max_items

    @property
    def max_tokens(self) -> int:
        """The most tokens of a sample, as `SIDBatch` says that a model sees it."""
        codes = self.max_items * self.num_hierarchies
        return len(self.contextual_vocab_sizes) + codes + self.max_candidates - 1

    @property
    def feature_to_max_seqlen(self) -> dict[str, int]:
        """The longest sequence of each feature, in codes; contextual features have one id."""
        return {
            **dict.fromkeys(self.contextual_vocab_sizes, 1),
            HISTORY: (self.max_items - self.max_candidates) * self.num_hierarchies,
            CANDIDATE: self.max_candidates * self.num_hierarchies,
        }
