"""One sample of the HSTU models."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class HSTUSample:
    """A user's history with the actions in it; all arrays are int64.

    Attributes:
        contextual: `[ids]` by contextual feature, usually one id each.
        items: `[items]`, oldest first, candidates last.
        actions: `[items]`, or None if the dataset has no actions.
        labels: `[labels]`, a class, a bit mask of tasks or the item itself; they belong to the last
            `labels` items.
        num_candidates: how many of the last items are candidates.
        negatives: `[negatives]`, items that the right ones are told from in training.
    """

    contextual: dict[str, np.ndarray]
    items: np.ndarray
    actions: np.ndarray | None
    labels: np.ndarray
    num_candidates: int
    negatives: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
