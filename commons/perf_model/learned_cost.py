"""Time of samples and speed of ranks, fitted to the steps of a training while it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from commons.perf_model.measured_cost import MeasuredCost
from commons.perf_model.nonnegative_fit import fitted

# Numbers of a rank's step: samples, tokens, squared tokens, and workload. They add up over samples. There is
# no constant: on a rank with less to compute, it could not be told from a lower speed.
NUM_COLUMNS = 4
_WORKLOAD = NUM_COLUMNS - 1
_ALL = list(range(NUM_COLUMNS))
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


@dataclass(frozen=True)
class LearnedCost:
    """Time of a rank's step: a sum over its samples, divided by the rank's speed.

    Attributes:
        coefficients: float64 `[NUM_COLUMNS]`, non-negative: seconds per sample, token, squared token, and
            unit of workload. All 0 before anything was fitted.
    """

    coefficients: np.ndarray

    @staticmethod
    def unknown() -> LearnedCost:
        """Returns the cost before anything was fitted."""
        return LearnedCost(np.zeros(NUM_COLUMNS))

    @property
    def is_known(self) -> bool:
        """Whether it predicts times."""
        return bool(self.coefficients.any())

    @property
    def follows_workloads(self) -> bool:
        """Whether times are proportional to workloads."""
        return not self.coefficients[:_WORKLOAD].any()

    def sample_seconds(self, tokens: np.ndarray, workloads: np.ndarray) -> np.ndarray:
        """Returns float64 `[samples]`, the time that each adds to a step.

        Equal on every processor: multiplications and additions one by one, without sums over samples.
        """
        per_sample, per_token, per_squared_token, per_workload = self.coefficients
        counts = tokens.astype(np.float64)
        quadratic = counts * per_squared_token
        return per_sample + counts * (per_token + quadratic) + workloads.astype(np.float64) * per_workload

    def as_measured(self, work: np.ndarray, seconds: np.ndarray) -> MeasuredCost:
        """Returns the cost by tokens alone, fitted to the same steps; for the advisor.

        Args:
            work, seconds: the last steps, as `refitted` takes them.

        Raises:
            ValueError: no sample costs anything.
        """
        normalized = seconds * speeds_then(self, work, seconds)
        coefficients = _fitted_columns(work, normalized, self.coefficients, _ALL[:_WORKLOAD])
        measured = MeasuredCost(0.0, *coefficients[:_WORKLOAD].tolist())
        predicted = measured.step_seconds(*np.moveaxis(work[..., :_WORKLOAD], -1, 0))
        return replace(measured, median_error=median_error(predicted, normalized))

    def rank_seconds(self, work: np.ndarray) -> np.ndarray:
        """Returns float64 `[...]`, times of steps at speed 1; `work` is `[..., NUM_COLUMNS]`."""
        return work @ self.coefficients


def rank_work(tokens: np.ndarray, workloads: np.ndarray, slot_of: np.ndarray, num_slots: int) -> np.ndarray:
    """Returns float64 `[slots, NUM_COLUMNS]`, numbers of each rank and step, given each sample's slot."""
    counts = tokens.astype(np.float64)

    def per_slot(values: np.ndarray | None) -> np.ndarray:
        return np.bincount(slot_of, values, minlength=num_slots)

    columns = (per_slot(None), per_slot(counts), per_slot(counts * counts), per_slot(workloads))
    return np.stack([column.astype(np.float64) for column in columns], 1)


def refitted(
    cost: LearnedCost, work: np.ndarray, seconds: np.ndarray, by_workload_alone: bool = False
) -> LearnedCost:
    """Returns the cost fitted anew: of samples if it predicts better than workloads do, else by workloads.

    The better one is found on the newest steps, with fits to the ones before. The result differs in its last
    bits between processors: let one rank fit.

    Args:
        cost: the last one. Where steps hold no evidence for a coefficient, as rows that are always equal, it
            is kept.
        work: float64 `[steps, ranks, NUM_COLUMNS]`, the oldest step first.
        seconds: float64 `[steps, ranks]`, measured, above 0.
        by_workload_alone: whether costs of samples stay in proportion to workloads.
    """
    if seconds.size < LEAST_TIMES:
        return cost
    normalized = seconds * speeds_then(cost, work, seconds)
    by_workload = _fitted_columns(work, normalized, cost.coefficients, [_WORKLOAD])
    first_judged = len(work) - max(int(len(work) * _JUDGED), 1)
    if by_workload_alone or first_judged < 2:
        return LearnedCost(by_workload)
    before, judged = slice(first_judged), slice(first_judged, None)
    errors = [
        median_error(
            work[judged] @ _fitted_columns(work[before], normalized[before], cost.coefficients, columns),
            normalized[judged],
        )
        for columns in (_ALL, [_WORKLOAD])
    ]
    share = _BETTER if cost.follows_workloads else 1 / _BETTER
    if errors[0] > share * errors[1]:
        return LearnedCost(by_workload)
    return LearnedCost(_fitted_columns(work, normalized, cost.coefficients, _ALL))


def speeds_then(cost: LearnedCost, work: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns float64 `[steps, ranks]`, the speeds of ranks around each step; arguments as for `refitted`.

    In turns with the cost that explains most, so that neither passes for the other. A median of the steps
    around each keeps the step in which a speed changed.
    """
    speeds = np.ones_like(seconds)
    if cost.is_known:
        speeds = _smoothed(cost.rank_seconds(work) / seconds)
    for _ in range(_TURNS):
        of_parts = _fitted_columns(work, seconds * speeds, cost.coefficients, _ALL)
        speeds = _smoothed(work @ of_parts / seconds)
    return speeds


def _smoothed(ratios: np.ndarray) -> np.ndarray:
    """float64 `[steps, ranks]`, ratios relative to the median rank's, and of the median step around each."""
    middle = np.median(ratios, axis=1, keepdims=True)
    counts = (ratios > 0) & (middle > 0)  # a rank's samples may cost nothing
    relative = np.divide(ratios, middle, out=np.ones_like(ratios), where=counts)
    around = np.pad(relative, ((_AROUND, _AROUND), (0, 0)), mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(around, 2 * _AROUND + 1, axis=0), axis=-1)


def median_error(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Returns the median of the relative errors."""
    return float(np.median(np.abs(predicted / measured - 1)))


def _fitted_columns(
    work: np.ndarray, seconds: np.ndarray, last: np.ndarray, columns: list[int]
) -> np.ndarray:
    """float64 `[NUM_COLUMNS]`: coefficients of some columns, the others 0.

    `work` is `[..., NUM_COLUMNS]`, `seconds` `[...]`, `last` `[NUM_COLUMNS]`.
    """
    work, seconds = work.reshape(-1, NUM_COLUMNS), seconds.reshape(-1)
    coefficients = last.copy() if columns == _ALL else np.zeros(NUM_COLUMNS)
    columns = [column for column in columns if work[:, column].any()]
    if not columns:
        return coefficients
    parts = (work[:, columns] / seconds[:, None]).mean(0)
    prior = last[columns]
    if not prior.any():
        prior = np.eye(len(columns))[-1] / parts[-1]
    prior = prior / (prior @ parts)  # how times divide among the columns, whatever their level
    coefficients[columns] = fitted(work[:, columns], seconds, _REWEIGHTINGS, prior, _PRIOR)
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
