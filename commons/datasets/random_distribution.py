"""The distributions that random lengths and ids are drawn from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import gin
import numpy as np

_NEEDED_PARAMETERS = {
    "uniform": ("low", "high"),
    "normal": ("mean", "std"),
    "zipf": ("alpha",),
    "lognormal": ("mean", "std"),
}


# A float64 that is an int64, and so is its negative; those beyond would become the smallest int64.
_LARGEST = 2.0**63 - 1024


@gin.configurable
@dataclass
class RandomDistribution:
    """A distribution of integers.

    Attributes:
        dist_type: "uniform" (integers in [low, high)), "normal", "zipf" or "lognormal"; draws of the last
            three are rounded, and clipped to [low, high].
        low: smallest value; None, where `dist_type` is not "uniform", means no limit.
        high: largest value, not reached by "uniform"; None means no limit, as above.
        mean: of "normal", and of "lognormal"'s values themselves, before clipping.
        std: standard deviation, of the same values as `mean`.
        alpha: exponent of "zipf", greater than 1.

    Raises:
        ValueError: a parameter that `dist_type` needs is missing, or a value is out of range.
    """

    dist_type: str
    low: int | None = None
    high: int | None = None
    mean: float | None = None
    std: float | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.dist_type not in _NEEDED_PARAMETERS:
            raise ValueError(
                f"RandomDistribution.dist_type = {self.dist_type!r}: "
                f"expected one of {', '.join(_NEEDED_PARAMETERS)}"
            )
        for name in _NEEDED_PARAMETERS[self.dist_type]:
            if getattr(self, name) is None:
                raise ValueError(f"RandomDistribution.{name} is not set: {self.dist_type} needs it")
        self._check_ranges()

    def _check_ranges(self) -> None:
        if self.low is not None and self.high is not None:
            smallest_high = self.low + 1 if self.dist_type == "uniform" else self.low
            if self.high < smallest_high:
                raise ValueError(
                    f"RandomDistribution.high = {self.high}: expected at least {smallest_high}, "
                    f"as low = {self.low}"
                )
        if self.std is not None and self.std < 0:
            raise ValueError(f"RandomDistribution.std = {self.std}: expected at least 0")
        if self.dist_type == "lognormal" and self.mean is not None and self.mean <= 0:
            raise ValueError(
                f"RandomDistribution.mean = {self.mean}: expected more than 0, as lognormal values are"
            )
        if self.dist_type == "zipf" and self.alpha is not None and self.alpha <= 1:
            raise ValueError(f"RandomDistribution.alpha = {self.alpha}: expected more than 1")

    def sample(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Draws `[size]` int64 values with `rng`."""
        if self.dist_type == "uniform":
            assert self.low is not None and self.high is not None
            return rng.integers(self.low, self.high, size)
        draws = np.clip(self._draw(rng, size), self.low, self.high)
        return np.rint(np.clip(draws, -_LARGEST, _LARGEST)).astype(np.int64)

    def _draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
        if self.dist_type == "zipf":
            assert self.alpha is not None
            return rng.zipf(self.alpha, size)
        assert self.mean is not None and self.std is not None
        if self.dist_type == "normal":
            return rng.normal(self.mean, self.std, size)
        variance = math.log1p((self.std / self.mean) ** 2)  # of the underlying normal
        return rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), size)
