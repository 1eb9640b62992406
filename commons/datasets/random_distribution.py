"""Gin settings of the distributions that random lengths and ids are drawn from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import gin
import numpy as np

from ..checks import check_types, require_setting, require_settings_at_least

_NEEDED_PARAMETERS = {
    "uniform": ("low", "high"),
    "normal": ("mean", "std"),
    "zipf": ("alpha",),
    "lognormal": ("mean", "std"),
}
# The largest float64 that int64 holds; larger draws would wrap to the smallest int64.
_LARGEST = 2.0**63 - 1024


@gin.configurable
@dataclass
class RandomDistribution:
    """A distribution of integers.

    Attributes:
        dist_type: "uniform" (integers in [low, high)), "normal", "zipf" or "lognormal". Draws of the last
            three are rounded and clipped to [low, high].
        low: smallest value. None means no limit, except for "uniform", which needs one.
        high: largest value, exclusive for "uniform" only. None as for `low`.
        mean: mean of "normal" and "lognormal", of the values themselves before clipping.
        std: standard deviation of the same values.
        alpha: exponent of "zipf", above 1.

    Raises:
        TypeError: a value does not have the type of its annotation.
        ValueError: a parameter that `dist_type` needs is missing, or a value is out of range.
    """

    dist_type: str
    low: int | None = None
    high: int | None = None
    mean: float | None = None
    std: float | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        known = f"one of {', '.join(_NEEDED_PARAMETERS)}"
        require_setting(self, self.dist_type in _NEEDED_PARAMETERS, "dist_type", known)
        for name in _NEEDED_PARAMETERS[self.dist_type]:
            if getattr(self, name) is None:
                raise ValueError(f"RandomDistribution.{name} is not set: {self.dist_type} needs it")
        for name in ("mean", "std", "alpha"):
            require_setting(self, math.isfinite(getattr(self, name) or 0), name, "a finite number")
        if self.low is not None:
            require_settings_at_least(self.low + (self.dist_type == "uniform"), self, "high")
        require_settings_at_least(0, self, "std")
        if self.dist_type == "lognormal":
            require_setting(self, (self.mean or 0) > 0, "mean", "more than 0, as lognormal values are")
        if self.dist_type == "zipf":
            require_setting(self, (self.alpha or 0) > 1, "alpha", "more than 1")

    def sample(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Draws `[size]` int64 values with `rng`."""
        if self.dist_type == "uniform":
            assert self.low is not None and self.high is not None
            return rng.integers(self.low, self.high, size)
        # Never None on both sides, which numpy takes only from 2.1 on.
        low = -_LARGEST if self.low is None else max(self.low, -_LARGEST)
        high = _LARGEST if self.high is None else min(self.high, _LARGEST)
        return np.rint(np.clip(self._draw(rng, size), low, high)).astype(np.int64)

    def _draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
        if self.dist_type == "zipf":
            assert self.alpha is not None
            return rng.zipf(self.alpha, size)
        assert self.mean is not None and self.std is not None
        if self.dist_type == "normal":
            return rng.normal(self.mean, self.std, size)
        variance = math.log1p((self.std / self.mean) ** 2)  # of the underlying normal distribution
        return rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), size)
