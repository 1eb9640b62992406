"""Fits of nonnegative coefficients to measured times."""

from __future__ import annotations

import numpy as np

# Keeps a fit unique despite rounding if columns are proportional to one another.
_LEAST_PRIOR = 1e-12
# Smaller shares of the times are rounding errors. They become 0.
_ROUNDING = 1e-9


def fitted(
    columns: np.ndarray,
    seconds: np.ndarray,
    reweightings: int,
    prior: np.ndarray | None = None,
    prior_weight: float = _LEAST_PRIOR,
) -> np.ndarray:
    """Fits nonnegative coefficients with small absolute relative errors.

    Uses iteratively reweighted least squares. Source: Holland and Welsch, "Robust Regression Using
    Iteratively Reweighted Least-Squares", 1977. Outliers, which have other causes, lose weight.

    Args:
        columns: float64 `[times, columns]`, nonnegative.
        seconds: float64 `[times]`, above 0.
        reweightings: number of rounds.
        prior: float64 `[columns]`, coefficients that decide what the times leave open. None means 0.
        prior_weight: weight of the prior, as a share of the weight of all times.

    Returns:
        float64 `[columns]`, the coefficients. A column of zeros without a prior gets 0.
    """
    relative = columns / seconds[:, None]
    scale = relative.mean(0)
    scale[scale == 0] = 1.0
    scaled = relative / scale
    start = np.zeros(len(scale)) if prior is None else prior * scale
    weights, found = np.ones(len(seconds)), start
    for _ in range(reweightings):
        weighted = scaled * weights[:, None]
        strength = prior_weight * float(weights @ weights)
        gram = weighted.T @ weighted + strength * np.eye(len(scale))
        found = _nonnegative_least_squares(gram, weighted.T @ weights + strength * start)
        weights = 1 / np.sqrt(np.maximum(np.abs(scaled @ found - 1), 1e-3))
    return np.where(found > _ROUNDING, found, 0.0) / scale


def _nonnegative_least_squares(gram: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Solves nonnegative least squares, given columnsᵀ·columns and columnsᵀ·target.

    Source: Bro and De Jong, "A Fast Non-Negativity-Constrained Least Squares Algorithm", 1997.
    """
    found, is_free = np.zeros(len(moments)), np.zeros(len(moments), dtype=bool)
    for _ in range(3 * len(moments)):
        gain = np.where(is_free, -np.inf, moments - gram @ found)
        if gain.max() <= 1e-12 * np.abs(moments).max():
            break
        is_free[np.argmax(gain)] = True
        while True:
            solved = np.zeros_like(found)
            solved[is_free] = np.linalg.solve(gram[np.ix_(is_free, is_free)], moments[is_free])
            below = is_free & (solved <= 0)
            if not below.any():
                found = solved
                break
            found += (found[below] / (found[below] - solved[below])).min() * (solved - found)
            is_free &= found > 1e-15
            found[~is_free] = 0.0
    return found
