"""What samples cost on a machine: seconds, fitted to measured steps."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from commons.perf_model.token_counts import Tokens, as_token_counts

_KIND = "measured cost"
LEAST_STEPS = 4  # of a fit of four coefficients
# Refits that give steps far off the curve, which something else has slowed, less weight.
_REWEIGHTINGS = 30


@dataclass(frozen=True)
class MeasuredCost:
    """Forward and backward time of a rank's samples: per step, plus per sample of T tokens a + b·T + c·T².

    Attributes:
        per_step: seconds that a step takes whatever it computes.
        per_sample: seconds, a.
        per_token: seconds, b.
        per_squared_token: seconds, c.
        median_error: of the fit: half of the steps were predicted nearer than this, relative to what was
            measured.

    Raises:
        ValueError: one of them is negative or not finite, or no sample would cost anything.
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
        """What each sample adds to its rank's step, in nanoseconds, rounded.

        Args:
            tokens: `[batch]` integers, tokens of each sample.

        Returns:
            `[batch]` int64, of the kind and on the device of `tokens`.

        Raises:
            TypeError, ValueError: as `HSTUFlops.per_sample`.
        """
        counts = as_token_counts(tokens)
        as_float = counts.double() if not isinstance(counts, np.ndarray) else counts.astype(np.float64)
        seconds = self.per_sample + as_float * (self.per_token + self.per_squared_token * as_float)
        nanoseconds = (seconds * 1e9).round()
        return nanoseconds.long() if not isinstance(nanoseconds, np.ndarray) else nanoseconds.astype(np.int64)

    def step_seconds(self, samples: np.ndarray, tokens: np.ndarray, squared: np.ndarray) -> np.ndarray:
        """What each step takes on a rank, from its number of samples, and the sums of their T and of T²."""
        return self.per_step + (
            self.per_sample * samples + self.per_token * tokens + self.per_squared_token * squared
        )

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"kind": _KIND, **dataclasses.asdict(self)}, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> MeasuredCost:
        """Reads what `save` has written.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is something else.
        """
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; expected a file that a calibration has written")
        try:
            read = json.loads(path.read_text())
            if read.pop("kind") != _KIND:
                raise ValueError("it is of another kind")
            return MeasuredCost(**read)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is no measured cost as a calibration writes it: {error}") from error

    @staticmethod
    def fit(
        samples: np.ndarray, tokens: np.ndarray, squared: np.ndarray, seconds: np.ndarray
    ) -> MeasuredCost:
        """The curve with the smallest sum of relative errors, of all whose coefficients are not negative.

        Where all steps have as many samples, what a step takes whatever it computes and what each sample adds
        cannot be told apart: all of it is taken for the step's, and `per_sample` is 0.

        Args:
            samples, tokens, squared: float64 `[steps]`, of each step of one rank the number of samples, and
                the sums of T and of T² over them.
            seconds: float64 `[steps]`, what was measured.

        Raises:
            ValueError: fewer than four steps took any time, or what they took does not grow with samples.
        """
        took_time = seconds > 0
        if took_time.sum() < LEAST_STEPS:
            raise ValueError(f"{int(took_time.sum())} measured steps; expected at least {LEAST_STEPS}")
        same_samples = (samples[took_time] == samples[took_time][0]).all()
        of_samples = np.zeros_like(samples) if same_samples else samples
        columns = np.stack([np.ones_like(seconds), of_samples, tokens, squared], 1)[took_time]
        relative = columns / seconds[took_time, None]
        weights = np.ones(len(relative))
        for _ in range(_REWEIGHTINGS):  # towards the smallest sum of absolute errors
            coefficients = _smallest_squares(relative * weights[:, None], weights)
            errors = np.abs(relative @ coefficients - 1)
            weights = 1 / np.sqrt(np.maximum(errors, 1e-3))
        per_step, per_sample, per_token, per_squared_token = coefficients.tolist()
        if not coefficients[1:].any():
            raise ValueError(
                f"in {int(took_time.sum())} steps the time of one, near {per_step * 1e3:.3g} ms, does not "
                "grow with its samples or their tokens; expected steps that compute more, or more of them"
            )
        return MeasuredCost(
            per_step, per_sample, per_token, per_squared_token, median_error=float(np.median(errors))
        )


def _smallest_squares(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Coefficients, none negative, of columns `[steps, 4]` that come nearest `[steps]` in squares.

    The best has some coefficients at 0 and the others where they would be by themselves: all are tried.
    """
    scale = np.abs(columns).max(0)
    best, best_error = np.zeros(columns.shape[1]), math.inf
    not_zero = np.flatnonzero(scale)  # of a column of zeros, rounding would decide
    scale[scale == 0] = 1.0
    for size in range(1, len(not_zero) + 1):
        for chosen in itertools.combinations(not_zero, size):
            part = (columns / scale)[:, chosen]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(((part @ found - target) ** 2).sum())
            if (found >= 0).all() and error < best_error:
                best_error = error
                best = np.zeros(columns.shape[1])
                best[list(chosen)] = found / scale[list(chosen)]
    return best
