"""Cost of samples and speed of ranks, fitted to the steps of a training while it runs."""

from __future__ import annotations

import numpy as np

from .cost import NUM_OTHERS, Cost, median_error
from .nonnegative_fit import fitted

# A fit takes at least this many times, of all ranks and steps together.
LEAST_TIMES = 24
# This share of the steps, the newest, judges what was fitted to the others.
_JUDGED = 0.25
# Learned costs take over once their error is at most this share of the workloads', and the other way round.
# In between, nothing changes.
_BETTER = 0.97
_REWEIGHTINGS = 5
# Turns in which speeds and costs are told apart, and steps on either side that a speed is the median of.
_TURNS, _AROUND = 2, 4
# Weight of the last coefficients, as a share of the weight of all steps: it decides where steps do not.
_PRIOR = 1e-4
# Smaller changes of a speed than this, and those within three standard errors of the median, are noise. (The
# error is that of independent steps; a busy host slows a few in a row.)
_LEAST_CHANGE = 0.03
# A speed changes by at most this share per plan, and stays within 1 / this and this.
MOST_CHANGE, _FARTHEST = 0.1, 100.0


def refitted(cost: Cost | None, counts: np.ndarray, seconds: np.ndarray) -> Cost | None:
    """Returns the cost fitted anew: of all counts if it predicts better than workloads do, else by workloads.

    The better one is found on the newest steps, with fits to the ones before. The result differs in its last
    bits between processors: let one rank fit.

    Args:
        cost: the last one; None before the first. Where steps hold no evidence for a coefficient, as rows
            that are always equal, it is kept.
        counts: float64 `[steps, ranks, 2 + columns]`, the oldest step first.
        seconds: float64 `[steps, ranks]`, measured, above 0.
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
    """Returns whether times are proportional to workloads, or unknown."""
    if cost is None:
        return True
    column_sums = cost.coefficients[NUM_OTHERS:]
    return not any(cost.coefficients[:NUM_OTHERS]) and len(set(column_sums)) == 1


def speeds_then(cost: Cost | None, counts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns float64 `[steps, ranks]`, the speeds of ranks around each step; arguments as for `refitted`.

    In turns with the cost that explains most, so that neither passes for the other. A median of the steps
    around each keeps the step in which a speed changed.
    """
    last = _coefficients(cost, counts)
    speeds = np.ones_like(seconds)
    if cost is not None:
        speeds = _smoothed(cost.step_seconds(counts) / seconds)
    for _ in range(_TURNS):
        speeds = _smoothed(counts @ _fitted_to_all(counts, seconds * speeds, last) / seconds)
    return speeds


def _coefficients(cost: Cost | None, counts: np.ndarray) -> np.ndarray:
    """float64 `[2 + columns]`, in seconds; 0 before anything was fitted."""
    return np.zeros(counts.shape[-1]) if cost is None else np.array(cost.coefficients) * 1e-9


def _smoothed(ratios: np.ndarray) -> np.ndarray:
    """float64 `[steps, ranks]`, ratios relative to the median rank's, and of the median step around each."""
    middle = np.median(ratios, axis=1, keepdims=True)
    counts = (ratios > 0) & (middle > 0)  # a rank's samples may cost nothing
    relative = np.divide(ratios, middle, out=np.ones_like(ratios), where=counts)
    around = np.pad(relative, ((_AROUND, _AROUND), (0, 0)), mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(around, 2 * _AROUND + 1, axis=0), axis=-1)


def _fitted_to_workloads(counts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """float64 `[2 + columns]`: seconds per unit of workload, the columns' sum; 0 for samples and tokens."""
    load = counts[..., NUM_OTHERS:].sum(-1).reshape(-1, 1)
    coefficients = np.zeros(counts.shape[-1])
    coefficients[NUM_OTHERS:] = fitted(load, seconds.reshape(-1), _REWEIGHTINGS)[0]
    return coefficients


def _fitted_to_all(counts: np.ndarray, seconds: np.ndarray, last: np.ndarray) -> np.ndarray:
    """float64 `[2 + columns]`: seconds per sample, per token, and per unit of each column.

    `counts` is `[..., 2 + columns]`, `seconds` `[...]`, `last` `[2 + columns]`.
    """
    counts, seconds = counts.reshape(-1, counts.shape[-1]), seconds.reshape(-1)
    coefficients = last.copy()
    counted = np.flatnonzero(counts.any(0))
    parts = (counts[:, counted] / seconds[:, None]).mean(0)
    prior = last[counted]
    if not prior.any():  # by workloads, if there are any
        prior = (counted >= min(NUM_OTHERS, counted[-1])).astype(np.float64)
    prior = prior / (prior @ parts)  # how times divide among the counts, whatever their level
    coefficients[counted] = fitted(counts[:, counted], seconds, _REWEIGHTINGS, prior, _PRIOR)
    return coefficients


def followed_speed(speed: float, ratios: np.ndarray) -> float:
    """Returns a rank's speed for the next plan: it follows times slowly, and not where noise explains them.

    Args:
        speed: the last one.
        ratios: float64 `[steps]`, predicted ÷ measured time of the rank, relative to the median rank of the
            step; above 0.
    """
    if not len(ratios):
        return speed
    estimate = float(np.median(ratios))
    # Of a median, 1.25 σ/√n; σ is 1.48 × the median absolute deviation.
    error = 1.25 * 1.48 * float(np.median(np.abs(ratios - estimate))) / estimate / np.sqrt(len(ratios))
    noise = max(_LEAST_CHANGE, 3 * error)
    if abs(estimate - 1) <= (noise if speed == 1.0 else noise / 2):  # not to and fro
        estimate = 1.0
    estimate = min(max(estimate, 1 / _FARTHEST), _FARTHEST)
    if abs(estimate / speed - 1) <= noise and estimate != 1.0:
        return speed
    return speed * min(max(estimate / speed, 1 - MOST_CHANGE), 1 + MOST_CHANGE)
