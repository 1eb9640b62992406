"""History lengths of public data sets, drawn to match published figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

SEED = 0
# Spread assumed for a data set without a published median. Sets with a median have 1.1 to 1.3, and a smaller
# spread does not overstate the gain of balancing.
ASSUMED_SPREAD = 1.0
READ = "2026-11-24"  # date on which the sources were read


@dataclass(frozen=True)
class PublishedLengths:
    """Published figures about the events per user of a data set, and lognormal lengths that match them.

    Attributes:
        title: the data set's name.
        mean: mean number of events per user.
        source: document that states the mean, `least`, and `most`.
        median: median number of events per user; None if none was found.
        median_source: document that states the median; None means `source`.
        least, most: fewest and most events of a user; `most` is None if it was not found.
        cap: number of newest events that a public trainer keeps; None if none was found.
        cap_source: source of that trainer.
    """

    title: str
    mean: float
    source: str
    median: float | None = None
    median_source: str | None = None
    least: int = 1
    most: int | None = None
    cap: int | None = None
    cap_source: str | None = None

    @property
    def spread(self) -> float:
        """Standard deviation of the lengths' logarithm, before clipping."""
        if self.median is None:
            return ASSUMED_SPREAD
        low, high = 0.0, 4.0
        for _ in range(60):
            middle = (low + high) / 2
            if self._mean(math.log(self.median), middle) > self.mean:
                high = middle
            else:
                low = middle
        return low

    @property
    def location(self) -> float:
        """Mean of the lengths' logarithm before clipping, which is the logarithm of the median."""
        if self.median is not None:
            return math.log(self.median)
        return math.log(self.mean) - self.spread**2 / 2

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Returns random lengths of `count` users, int64 `[count]`."""
        lengths = rng.lognormal(self.location, self.spread, count)
        return np.rint(lengths.clip(self.least, self.most)).astype(np.int64)

    def describe(self) -> str:
        """Returns the figures that the lengths match, and their sources, in a sentence without a period."""
        facts = [f"mean {self.mean:,.0f} ({self.source})"]
        if self.least > 1:
            facts.append(f"at least {self.least}")
        if self.most is not None:
            facts.append(f"at most {self.most:,}")
        if self.median is None:
            facts.append(f"no median was found, so the spread of the logarithm, {ASSUMED_SPREAD}, is assumed")
        else:
            where = "" if self.median_source is None else f" ({self.median_source})"
            facts.insert(1, f"median {self.median:,.0f}{where}")
        if self.cap is not None:
            facts.append(f"a trainer keeps the newest {self.cap:,} ({self.cap_source})")
        return (
            f"Lengths are not {self.title}'s own, but lognormal, to match published figures on its users: "
            f"{'; '.join(facts)}; read {READ}"
        )

    def _mean(self, location: float, spread: float) -> float:
        """Returns the mean of lognormal lengths clipped to `least` and `most`."""
        spread, normal = max(spread, 1e-9), NormalDist().cdf
        low = (math.log(self.least) - location) / spread
        high = math.inf if self.most is None else (math.log(self.most) - location) / spread
        inside = math.exp(location + spread**2 / 2) * (normal(high - spread) - normal(low - spread))
        return self.least * normal(low) + inside + (0 if self.most is None else self.most * normal(-high))


_KUAIRAND = "https://github.com/chongminggao/KuaiRand"
_RECSYS_EXAMPLES = "NVIDIA/recsys-examples, examples/hstu/training/configs, commit 43465ae"
_GROUPLENS = "https://files.grouplens.org/datasets/movielens"
_LENSKIT = "of the lognormal that https://codex.lenskit.org/movielens/{}/description.html fits"
_GENERATIVE_RECOMMENDERS = "meta-recsys/generative-recommenders, configs/ml-20m, commit db1bf8f"
PUBLIC_DATA = {
    "yambda-5b": PublishedLengths(
        "Yambda-5B",
        mean=4763,
        median=2695,
        most=27_738,
        source="recommendation/README.MD of https://github.com/mlcommons/training/pull/889",
        cap=4086,
        cap_source="MLPerf Training, the same file",
    ),
    "kuairand-27k": PublishedLengths(
        "KuaiRand-27K",
        mean=322_278_385 / 27_285,
        source=f"322,278,385 interactions of 27,285 users, {_KUAIRAND}",
        cap=8000,
        cap_source=_RECSYS_EXAMPLES,
    ),
    "kuairand-1k": PublishedLengths(
        "KuaiRand-1K",
        mean=11_713_045 / 1000,
        source=f"11,713,045 interactions of 1,000 users, {_KUAIRAND}",
        cap=4096,
        cap_source=_RECSYS_EXAMPLES,
    ),
    "ml-20m": PublishedLengths(
        "MovieLens 20M",
        mean=20_000_263 / 138_493,
        least=20,
        source=f"20,000,263 ratings of 138,493 users, {_GROUPLENS}/ml-20m-README.html",
        median=19.074 + 43.156,
        median_source=_LENSKIT.format("ML20M"),
        cap=200,
        cap_source=_GENERATIVE_RECOMMENDERS,
    ),
    "ml-32m": PublishedLengths(
        "MovieLens 32M",
        mean=32_000_204 / 200_948,
        least=20,
        source=f"32,000,204 ratings of 200,948 users, {_GROUPLENS}/ml-32m-README.html",
        median=18.986 + 48.172,
        median_source=_LENSKIT.format("ML32M"),
    ),
    "taobao": PublishedLengths(
        "Taobao UserBehavior",
        mean=100_150_807 / 987_994,
        source="100,150,807 behaviors of 987,994 users, https://tianchi.aliyun.com/dataset/649",
    ),
}
