"""Data of models that generate semantic IDs: dataset specs, samples, and batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..argument_checks import require, require_at_least
from ..sequence_batch import BaseBatch
from .sample_source import SampleSource, keyed_rows, padded

HISTORY, CANDIDATE = "history", "candidate"


@dataclass(frozen=True)
class SIDDatasetSpec:
    """Codes and lengths of a dataset, which determine the sizes of a model for it.

    Attributes:
        codebook_sizes: sizes of the codebooks. Codes of hierarchy h are in [0, codebook_sizes[h]).
        max_history_length: largest number of items before the candidates, at least 1. Samples keep their
            newest items. If all items are candidates, it counts the items before the target.
        max_candidate_length: number of a sample's newest items that the loss covers. 1 means only the target,
            and 0 means all items.
        contextual_vocab_sizes: number of ids of each feature that describes the user.

    Raises:
        ValueError: there is no codebook, or a value is out of range.
    """

    codebook_sizes: tuple[int, ...]
    max_history_length: int
    max_candidate_length: int = 1
    contextual_vocab_sizes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = self.codebook_sizes
        require(bool(sizes) and min(sizes) >= 1, "codebook_sizes", sizes, "positive sizes, at least one")
        require_at_least(1, "max_history_length", self.max_history_length)
        expected = "0, for a loss on the whole history, or the number of newest items that the loss covers"
        require(self.max_candidate_length >= 0, "max_candidate_length", self.max_candidate_length, expected)
        for name, size in self.contextual_vocab_sizes.items():
            if size < 1 or name in (HISTORY, CANDIDATE):
                raise ValueError(
                    f"contextual feature {name!r} has {size} ids: expected at least 1, and a name other than "
                    f"{HISTORY!r} and {CANDIDATE!r}"
                )

    @property
    def num_hierarchies(self) -> int:
        """Number of codes per item."""
        return len(self.codebook_sizes)

    @property
    def max_items(self) -> int:
        """Largest number of items per sample, including candidates."""
        return self.max_history_length + max(self.max_candidate_length, 1)

    @property
    def max_candidates(self) -> int:
        """Largest number of candidates per sample."""
        return self.max_candidate_length or self.max_items

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens per sample, as `SIDBatch` counts them."""
        codes = self.max_items * self.num_hierarchies
        return len(self.contextual_vocab_sizes) + codes + self.max_candidates - 1

    @property
    def feature_to_max_seqlen(self) -> dict[str, int]:
        """Length of each feature's longest sequence, in codes. Contextual features have one id."""
        return {
            **dict.fromkeys(self.contextual_vocab_sizes, 1),
            HISTORY: (self.max_items - self.max_candidates) * self.num_hierarchies,
            CANDIDATE: self.max_candidates * self.num_hierarchies,
        }


@dataclass(frozen=True)
class SIDSample:
    """One user's items as semantic IDs. All arrays are int64.

    Attributes:
        codes: `[items, num_hierarchies]`, at least one item, oldest first. The last item is the target.
        target_item: id of the last item.
        contextual: `[ids]` of each contextual feature.
    """

    codes: np.ndarray
    target_item: int
    contextual: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(eq=False)
class SIDBatch(BaseBatch):
    """A batch of item histories. Each item is its semantic ID, `num_hierarchies` codes in order.

    `features` has the contextual features, the codes of the history, oldest item first, and the codes of the
    candidates. The model predicts each candidate from everything before it. A sample has at least one
    candidate, and its last candidate is the target of retrieval. All candidate codes are loss tokens.

    A model sees a sample as its contextual ids, then the codes of its history, then a beginning-of-sequence
    token (BOS) and the codes for each candidate. The very last code predicts nothing and is left out.

    Attributes:
        history_feature_name: key of `features` with the history's codes.
        candidate_feature_name: key of `features` with the candidates' codes.
        num_hierarchies: codes per item, at least 1.
        target_items: `[batch_size]` int64 ids of the samples' last candidates, or None. Padding rows may have
            any value.

    Raises:
        ValueError: `num_hierarchies` is not positive, or a feature is missing.
    """

    history_feature_name: str = HISTORY
    candidate_feature_name: str = CANDIDATE
    num_hierarchies: int = 1
    target_items: torch.Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, "num_hierarchies", self.num_hierarchies)
        keys = self.features.keys()
        for name in (*self.contextual_feature_names, self.history_feature_name, self.candidate_feature_name):
            if name not in keys:
                raise ValueError(f"features has no key {name!r}; it has {keys}")

    def feature_lengths(self, name: str) -> torch.Tensor:
        """Returns the number of ids of one feature in each row, `[batch_size]` int64."""
        lengths = self.features.lengths().view(-1, self.batch_size)
        return lengths[self.features.keys().index(name)].long()

    def num_tokens(self) -> torch.Tensor:
        """Returns the tokens of each row as a model sees it, `[batch_size]` int64; 0 for padding rows."""
        codes = self.feature_lengths(self.candidate_feature_name)
        tokens = codes + codes // self.num_hierarchies - (codes > 0).long()
        for name in (*self.contextual_feature_names, self.history_feature_name):
            tokens = tokens + self.feature_lengths(name)
        return tokens

    def num_loss_tokens(self) -> torch.Tensor:
        """Returns the candidate codes of each row, `[batch_size]` int64; 0 for padding rows."""
        return self.feature_lengths(self.candidate_feature_name)


class SIDSource(SampleSource):
    """Samples by index. An index gives the same sample in every process.

    Attributes:
        spec: codes and lengths of the samples.
    """

    spec: SIDDatasetSpec

    @abstractmethod
    def __getitem__(self, index: int) -> SIDSample:
        """Returns a sample of at most `spec.max_items` items."""

    def collate(self, samples: Sequence[SIDSample], batch_size: int) -> SIDBatch:
        """Returns a host batch of `batch_size` rows: the samples, then padding rows of length 0.

        A sample's newest `spec.max_candidates` items are its candidates, or all items if it has fewer.

        Raises:
            ValueError: there are more samples than rows, or `batch_size` is 0.
        """
        spec = self.spec
        ids = {name: [sample.contextual[name] for sample in samples] for name in spec.contextual_vocab_sizes}
        newest = spec.max_candidates
        splits = [np.split(sample.codes, [max(len(sample.codes) - newest, 0)]) for sample in samples]
        ids[HISTORY] = [history.reshape(-1) for history, _ in splits]
        ids[CANDIDATE] = [candidates.reshape(-1) for _, candidates in splits]
        return SIDBatch(
            features=keyed_rows(ids, batch_size),
            batch_size=batch_size,
            feature_to_max_seqlen=spec.feature_to_max_seqlen,
            contextual_feature_names=list(spec.contextual_vocab_sizes),
            actual_batch_size=len(samples),
            history_feature_name=HISTORY,
            candidate_feature_name=CANDIDATE,
            num_hierarchies=spec.num_hierarchies,
            target_items=padded([sample.target_item for sample in samples], batch_size),
        )
