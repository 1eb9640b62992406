"""Fits of costs, which are nonnegative coefficients, to measured times."""

from __future__ import annotations

import dataclasses

import numpy as np

from ...perf_model.cost import NUM_OTHERS, Cost

LINEAR = (
    "get_workloads is linear in tokens, so nothing that grows faster, such as attention, can be learned from "
    "times: return it as a second column, as in torch.stack([tokens, tokens**2], 1)"
)
# Enough rounds to converge to the smallest sum of absolute errors.
_REWEIGHTINGS = 30
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


def fit_cost(counts: np.ndarray, seconds: np.ndarray) -> Cost:
    """Fits the cost with the smallest sum of absolute relative errors.

    If all steps have the same number of samples, the costs per step and per sample cannot be separated. Then
    `per_step` includes both, and the coefficient of samples is 0. This holds for any constant count.

    Args:
        counts: float64 `[steps, 2 + columns]`, sums over the samples of one rank's step.
        seconds: float64 `[steps]`, measured times. 0 means that a step was not measured.

    Raises:
        ValueError: there are fewer measured steps than unknowns (the coefficients and `per_step`), or times
            do not grow with the samples.
    """
    counts, seconds = counts[seconds > 0], seconds[seconds > 0]
    least = counts.shape[1] + 1  # one per coefficient, and one for the step
    if len(seconds) < least:
        raise ValueError(f"{len(seconds)} measured steps; expected at least {least}")
    fitted_counts = counts.copy()
    fitted_counts[:, (counts == counts[0]).all(0)] = 0
    with_step = np.concatenate([np.ones((len(seconds), 1)), fitted_counts], 1)
    per_step, *coefficients = (1e9 * fitted(with_step, seconds, _REWEIGHTINGS)).tolist()
    if not any(coefficients):
        raise ValueError(
            f"in {len(seconds)} steps the time of one, near {per_step / 1e6:.3g} ms, does not grow with its "
            "samples or their tokens; expected steps that compute more, or more of them"
        )
    cost = Cost(tuple(coefficients), per_step)
    return dataclasses.replace(cost, median_error=median_error(cost.step_seconds(counts), seconds))


def median_error(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Returns the median relative error of predictions."""
    return float(np.median(np.abs(predicted / measured - 1)))


def is_linear(counts: np.ndarray) -> bool:
    """Returns whether all columns are linear in samples and tokens, and these two are not proportional.

    Args:
        counts: float64 `[steps, 2 + columns]`, sums over samples.
    """
    others, work = counts[:, :NUM_OTHERS], counts[:, NUM_OTHERS:]
    if np.linalg.matrix_rank(others) < NUM_OTHERS:
        return False
    found = others @ np.linalg.lstsq(others, work, rcond=None)[0]
    return bool(np.allclose(found, work, rtol=1e-6, atol=0))
