"""Costs of samples and speeds of ranks, fitted to the steps of a training run while it runs."""

from __future__ import annotations

import numpy as np

from ...perf_model.cost import NUM_OTHERS, Cost
from .fitting import fitted, median_error

# A fit needs at least this many times, over all ranks and steps.
LEAST_TIMES = 24
# The newest steps judge fits to the older steps. This is their share of all steps.
_JUDGED = 0.25
# Learned costs replace workloads once their error is at most this share of the error of workloads. Workloads
# replace learned costs by the same rule, so that small differences change nothing.
_BETTER = 0.97
_REWEIGHTINGS = 5
# Rounds that separate speeds from costs, and steps on either side that enter a speed's median.
_TURNS, _AROUND = 2, 4
# Weight of the last coefficients, as a share of the weight of all steps. They decide what steps leave open.
_PRIOR = 1e-4
# A change of speed below this, or within three standard errors of the median, is noise. The error assumes
# that steps are independent, although a busy host slows several steps in a row.
_LEAST_CHANGE = 0.03
# A speed changes by at most this share per plan, and stays between 1 / _FARTHEST and _FARTHEST.
MOST_CHANGE, _FARTHEST = 0.1, 100.0


def refitted(cost: Cost | None, counts: np.ndarray, seconds: np.ndarray) -> Cost | None:
    """Fits a new cost to all counts if they predict times better than workloads do, or else to workloads.

    The newest steps judge the two fits, which use the steps before them. Fewer than `LEAST_TIMES` times leave
    `cost` as it is. The last bits of the result differ between processors, so only one rank should fit.

    Args:
        cost: previous cost. None means that this is the first fit. A coefficient is kept if the steps give no
            evidence for it, such as the cost per sample if ranks always have equal rows.
        counts: float64 `[steps, ranks, 2 + columns]`, the oldest step first.
        seconds: float64 `[steps, ranks]`, measured times, above 0.
    """
    if seconds.size < LEAST_TIMES:
        return cost
    last = _coefficients(cost, counts)
    normalized = seconds * speeds_then(cost, counts, seconds)
    found = _fitted_to_workloads(counts, normalized)
    first_judged = len(counts) - max(int(len(counts) * _JUDGED), 1)
    if first_judged >= 2:
        before, judged = slice(first_judged), slice(first_judged, None)
        by_all = _fitted_to_all(counts[before], normalized[before], last)
        by_workloads = _fitted_to_workloads(counts[before], normalized[before])
        errors = [median_error(counts[judged] @ fit, normalized[judged]) for fit in (by_all, by_workloads)]
        if errors[0] <= (_BETTER if follows_workloads(cost) else 1 / _BETTER) * errors[1]:
            found = _fitted_to_all(counts, normalized, last)
    return Cost(tuple((found * 1e9).tolist())) if found.any() else cost


def follows_workloads(cost: Cost | None) -> bool:
    """Returns whether a cost is proportional to workloads. None, which means no fit yet, counts as one."""
    if cost is None:
        return True
    column_sums = cost.coefficients[NUM_OTHERS:]
    return not any(cost.coefficients[:NUM_OTHERS]) and len(set(column_sums)) == 1


def speeds_then(cost: Cost | None, counts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns the speeds of ranks around each step, float64 `[steps, ranks]`. Arguments are as in `refitted`.

    Fits of the cost alternate with fits of the speeds, so that neither is mistaken for the other. The median
    over the steps around each step preserves the step in which a speed changes.
    """
    last = _coefficients(cost, counts)
    speeds = np.ones_like(seconds)
    if cost is not None:
        speeds = _smoothed(cost.step_seconds(counts) / seconds)
    for _ in range(_TURNS):
        speeds = _smoothed(counts @ _fitted_to_all(counts, seconds * speeds, last) / seconds)
    return speeds


def _coefficients(cost: Cost | None, counts: np.ndarray) -> np.ndarray:
    """Returns the coefficients in seconds, float64 `[2 + columns]`; zeros before the first fit."""
    return np.zeros(counts.shape[-1]) if cost is None else np.array(cost.coefficients) * 1e-9


def _smoothed(ratios: np.ndarray) -> np.ndarray:
    """Returns ratios ÷ those of the median rank, smoothed by medians over steps, float64 `[steps, ranks]`."""
    middle = np.median(ratios, axis=1, keepdims=True)
    counts = (ratios > 0) & (middle > 0)  # a rank's samples may cost nothing
    relative = np.divide(ratios, middle, out=np.ones_like(ratios), where=counts)
    around = np.pad(relative, ((_AROUND, _AROUND), (0, 0)), mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(around, 2 * _AROUND + 1, axis=0), axis=-1)


def _fitted_to_workloads(counts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Fits seconds per unit of workload, the columns' sum, float64 `[2 + columns]`; 0 for other counts."""
    load = counts[..., NUM_OTHERS:].sum(-1).reshape(-1, 1)
    coefficients = np.zeros(counts.shape[-1])
    coefficients[NUM_OTHERS:] = fitted(load, seconds.reshape(-1), _REWEIGHTINGS)[0]
    return coefficients


def _fitted_to_all(counts: np.ndarray, seconds: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Fits seconds per sample, per token, and per unit of each column, float64 `[2 + columns]`.

    `counts` is `[..., 2 + columns]`, `seconds` `[...]`, `last` `[2 + columns]`.
    """
    counts, seconds = counts.reshape(-1, counts.shape[-1]), seconds.reshape(-1)
    coefficients = last.copy()
    counted = np.flatnonzero(counts.any(0))
    parts = (counts[:, counted] / seconds[:, None]).mean(0)
    prior = last[counted]
    if not prior.any():  # start from workloads, if any were counted
        prior = (counted >= min(NUM_OTHERS, counted[-1])).astype(np.float64)
    prior = prior / (prior @ parts)  # only the proportions of the prior matter, not its level
    coefficients[counted] = fitted(counts[:, counted], seconds, _REWEIGHTINGS, prior, _PRIOR)
    return coefficients


def followed_speed(speed: float, ratios: np.ndarray) -> float:
    """Returns a rank's speed for the next plan. It follows times slowly, and ignores changes within noise.

    Args:
        speed: speed for the last plan.
        ratios: float64 `[steps]`, predicted ÷ measured time of the rank, relative to the median rank of each
            step; above 0.
    """
    if not len(ratios):
        return speed
    estimate = float(np.median(ratios))
    # The standard error of a median is 1.25 σ/√n, and σ is 1.48 × the median absolute deviation.
    error = 1.25 * 1.48 * float(np.median(np.abs(ratios - estimate))) / estimate / np.sqrt(len(ratios))
    noise = max(_LEAST_CHANGE, 3 * error)
    if abs(estimate - 1) <= (noise if speed == 1.0 else noise / 2):  # hysteresis: no flipping back and forth
        estimate = 1.0
    estimate = min(max(estimate, 1 / _FARTHEST), _FARTHEST)
    if abs(estimate / speed - 1) <= noise and estimate != 1.0:
        return speed
    return speed * min(max(estimate / speed, 1 - MOST_CHANGE), 1 + MOST_CHANGE)
