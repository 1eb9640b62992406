"""All that is said about one run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.advisor.lengths import SampleLengths
from commons.advisor.prediction import Case
from commons.advisor.recommendation import Recommendation

_BINS = 60


@dataclass(frozen=True)
class LengthSummary:
    """What a reader must know of the lengths.

    Of a histogram, bin i has `counts[i]` lengths from `edges[i]` to `edges[i + 1]`, exclusive.
    """

    samples: int
    smallest: int
    mean: float
    median: float
    percentile_99: float
    largest: int
    edges: list[int]
    counts: list[int]

    @staticmethod
    def of(items: np.ndarray) -> LengthSummary:
        """Of int64 `[samples]`; each bin is wider than the one before by about the same factor."""
        longest = int(items.max())
        edges = np.unique(np.rint(np.geomspace(1, longest + 2, _BINS + 1)).astype(np.int64) - 1)
        counts, _ = np.histogram(items, bins=edges)
        median, high = np.percentile(items, [50, 99])
        return LengthSummary(
            samples=len(items),
            smallest=int(items.min()),
            mean=float(items.mean()),
            median=float(median),
            percentile_99=float(high),
            largest=int(items.max()),
            edges=edges.tolist(),
            counts=counts.tolist(),
        )


@dataclass(frozen=True)
class Advice:
    """What was asked, and the answer.

    Attributes:
        samples, lengths: of the data.
        model: in words.
        assumptions: sentences.
        cases: by number of ranks, each with what to do.
        over_ranks: cases to draw the speedup over ranks with; empty where nobody asked.
    """

    samples: SampleLengths
    lengths: LengthSummary
    model: str
    assumptions: list[str]
    cases: list[tuple[Case, Recommendation]]
    over_ranks: list[Case]
