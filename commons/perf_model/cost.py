"""The cost of samples, as a nonnegative linear function of their counts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_KIND = "cost of samples, tokens and workloads"
# Number of counts before the columns of `get_workloads`: samples and tokens.
NUM_OTHERS = 2
# The largest float64 below 2^63.
_LARGEST = float(2**63 - 1024)


@dataclass(frozen=True)
class Cost:
    """The cost of a row, as a nonnegative linear function of its counts.

    The counts are samples (1 for a whole sample or its first piece, 0 for a later piece), tokens, and the
    columns of `get_workloads`. The cost "flops" adds up the columns. Coefficients fitted to measured steps
    are nanoseconds of forward and backward.

    Provisional: may change in a minor version.

    Attributes:
        coefficients: cost per sample, per token, and per unit of each column.
        per_step: nanoseconds that every step takes, whatever its samples. No placement changes this time, so
            no load includes it.
        median_error: median relative error of the fit over the steps.

    Raises:
        ValueError: a value is negative or not finite, no column has a coefficient, or all coefficients are 0.
    """

    coefficients: tuple[float, ...]
    per_step: float = 0.0
    median_error: float = 0.0

    def __post_init__(self) -> None:
        for value in (*self.coefficients, self.per_step, self.median_error):
            if isinstance(value, bool) or not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{self} has {value}; expected finite numbers of at least 0")
        object.__setattr__(self, "coefficients", tuple(map(float, self.coefficients)))  # integers overflow
        if self.num_columns < 1:
            raise ValueError(f"{self} has no coefficient of a column of get_workloads; expected one")
        if not any(self.coefficients):
            raise ValueError(f"no sample costs anything in {self}; expected a coefficient above 0")

    @staticmethod
    def sum_of_columns(num_columns: int) -> Cost:
        """Returns the cost that adds up the columns of `get_workloads`, in their unit."""
        return Cost((0.0,) * NUM_OTHERS + (1.0,) * num_columns)

    @property
    def num_columns(self) -> int:
        """The number of columns of `get_workloads` that have a coefficient."""
        return len(self.coefficients) - NUM_OTHERS

    def of(self, samples: np.ndarray | int, tokens: np.ndarray, work: np.ndarray) -> np.ndarray:
        """Returns the cost of each row, int64 `[rows]`, limited to the range of int64.

        It multiplies and adds elementwise, in a fixed order, so the result is equal on every processor.

        Args:
            samples: `[rows]`, 1 for a whole sample or its first piece, else 0; or one number for all rows.
            tokens: int64 `[rows]`, tokens of each row.
            work: int64 `[rows, columns]`, result of `get_workloads`.
        """
        cost = np.zeros(len(tokens))
        for coefficient, count in zip(self.coefficients, (samples, tokens, *work.T), strict=True):
            if coefficient:
                cost += coefficient * count
        return np.rint(np.minimum(cost, _LARGEST)).astype(np.int64)

    def step_seconds(self, counts: np.ndarray) -> np.ndarray:
        """Predicts the seconds of steps, float64 `[...]`, from sums of counts, `[..., 2 + columns]`."""
        return (self.per_step + counts @ np.array(self.coefficients)) * 1e-9

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cost to a JSON file, and makes the file's folder if it is missing."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"kind": _KIND, **dataclasses.asdict(self)}, indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cost:
        """Reads a file written by `save`.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file does not hold a cost.
        """
        try:
            read = json.loads(Path(path).read_text())
            if read.pop("kind") != _KIND:
                raise ValueError(f"it is of another kind; expected {_KIND!r}")
            return Cost(**read)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is not a cost written by a calibration: {error}") from error


def sum_counts(
    samples: np.ndarray, tokens: np.ndarray, work: np.ndarray, rank_of: np.ndarray, num_ranks: int
) -> np.ndarray:
    """Returns the sums of each rank's counts in a step, float64 `[ranks, 2 + columns]`, to fit costs to.

    The counts include no constant, because on a lightly loaded rank it would look like a lower speed.

    Args:
        samples, tokens, work: counts of each row, as `Cost.of` takes them.
        rank_of: int64 `[rows]`, rank of each row.
    """
    row_values = (samples, tokens, *work.T)
    return np.stack([np.bincount(rank_of, count, minlength=num_ranks) for count in row_values], 1)
