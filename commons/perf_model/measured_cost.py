"""Time of samples on a machine, fitted to measured steps."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from commons.perf_model.nonnegative_fit import fitted
from commons.perf_model.token_counts import Tokens, as_token_counts

_KIND = "measured cost"
LEAST_STEPS = 4  # one per coefficient
# Enough to converge to the smallest sum of absolute errors.
_REWEIGHTINGS = 30


@dataclass(frozen=True)
class MeasuredCost:
    """Forward and backward time of a rank's step: a constant plus a + b·T + c·T² per sample of T tokens.

    Attributes:
        per_step: seconds that a step takes regardless of its samples.
        per_sample: seconds, a.
        per_token: seconds, b.
        per_squared_token: seconds, c.
        median_error: median relative error of the fit over the steps.

    Raises:
        ValueError: a value is negative or not finite, or all costs of a sample are 0.
    """

    per_step: float
    per_sample: float
    per_token: float
    per_squared_token: float
    median_error: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; expected a finite number of at least 0")
        if not self.per_sample + self.per_token + self.per_squared_token > 0:
            raise ValueError("no sample costs anything; expected one of the seconds above 0")

    def per_sample_ns(self, tokens: Tokens) -> Tokens:
        """Returns the time that each sample adds to its rank's step, in rounded nanoseconds.

        Args:
            tokens: `[batch_size]` integers, tokens of each sample.

        Returns:
            `[batch_size]` int64, with the container type and device of `tokens`.

        Raises:
            TypeError, ValueError: see `HSTUFlops.per_sample`.
        """
        counts = as_token_counts(tokens)
        as_float = counts.double() if not isinstance(counts, np.ndarray) else counts.astype(np.float64)
        seconds = self.per_sample + as_float * (self.per_token + self.per_squared_token * as_float)
        nanoseconds = (seconds * 1e9).round()
        return nanoseconds.long() if not isinstance(nanoseconds, np.ndarray) else nanoseconds.astype(np.int64)

    def step_seconds(self, samples: np.ndarray, tokens: np.ndarray, squared: np.ndarray) -> np.ndarray:
        """Returns the time of a rank's steps, given numbers of samples and their sums of T and T²."""
        return self.per_step + (
            self.per_sample * samples + self.per_token * tokens + self.per_squared_token * squared
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cost as JSON."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"kind": _KIND, **dataclasses.asdict(self)}, indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> MeasuredCost:
        """Reads a file written by `save`.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file does not contain a measured cost.
        """
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; expected a file written by a calibration")
        try:
            read = json.loads(path.read_text())
            if read.pop("kind") != _KIND:
                raise ValueError(f"it is of another kind; expected {_KIND!r}")
            return MeasuredCost(**read)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is not a measured cost written by a calibration: {error}") from error

    @staticmethod
    def fit(
        samples: np.ndarray, tokens: np.ndarray, squared: np.ndarray, seconds: np.ndarray
    ) -> MeasuredCost:
        """Fits nonnegative coefficients with the smallest sum of absolute relative errors.

        If all steps have the same number of samples, the cost per step and per sample cannot be separated.
        Then `per_step` takes all of it, and `per_sample` is 0.

        Args:
            samples, tokens, squared: float64 `[steps]`, number of samples of each step of one rank, and their
                sums of T and T².
            seconds: float64 `[steps]`, measured times.

        Raises:
            ValueError: fewer than four steps took any time, or times do not grow with the samples.
        """
        took_time = seconds > 0
        if took_time.sum() < LEAST_STEPS:
            raise ValueError(f"{int(took_time.sum())} measured steps; expected at least {LEAST_STEPS}")
        same_samples = (samples[took_time] == samples[took_time][0]).all()
        of_samples = np.zeros_like(samples) if same_samples else samples
        columns = np.stack([np.ones_like(seconds), of_samples, tokens, squared], 1)[took_time]
        coefficients = fitted(columns, seconds[took_time], _REWEIGHTINGS)
        errors = np.abs(columns @ coefficients / seconds[took_time] - 1)
        per_step, per_sample, per_token, per_squared_token = coefficients.tolist()
        if not coefficients[1:].any():
            raise ValueError(
                f"in {int(took_time.sum())} steps the time of one, near {per_step * 1e3:.3g} ms, does not "
                "grow with its samples or their tokens; expected steps that compute more, or more of them"
            )
        return MeasuredCost(
            per_step, per_sample, per_token, per_squared_token, median_error=float(np.median(errors))
        )
