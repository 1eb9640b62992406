"""Fits the cost of samples to training logs.

    python -m commons.extensions.learned_costs.calibrate OUT.json LOG.jsonl...

Each LOG.jsonl is the `train.jsonl` in a run's `log_dir`, of the same model on the same machine. Lines that
cover a single step (`TrainerArgs.log_interval = 1`) are the most informative.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...local_paths import local_path
from ...perf_model.cost import NUM_OTHERS, Cost
from .fitting import LINEAR, fit_cost, is_linear

# First steps of a run. Their times include one-off costs, such as first allocations and kernel compilation.
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class MeasuredSteps:
    """Measured steps of single ranks, or means over several steps.

    Attributes:
        counts: float64 `[steps, 2 + columns]`: samples that the rank computed, their tokens, and the columns
            of `get_workloads`.
        seconds: float64 `[steps]`, time of forward and backward, without waits for other ranks.
    """

    counts: np.ndarray
    seconds: np.ndarray

    @staticmethod
    def of(rows: Sequence[Sequence[float]]) -> MeasuredSteps:
        """Builds steps from rows of counts, each followed by its seconds. Rows with 0 seconds are left out.

        Raises:
            ValueError: the rows have different numbers of columns.
        """
        if len({len(row) for row in rows}) > 1:
            raise ValueError("steps differ in their columns of get_workloads; expected those of one model")
        table = np.array(rows, dtype=np.float64) if rows else np.zeros((0, NUM_OTHERS + 2))
        measured = table[table[:, -1] > 0]
        return MeasuredSteps(measured[:, :-1], measured[:, -1])

    @staticmethod
    def read(path: Path) -> list[tuple[float, ...]]:
        """Reads the last run in a training log as rows for `of`, without the run's first steps.

        Raises:
            ValueError: the file is not a training log; the message names the line.
        """
        rows: list[tuple[float, ...]] = []
        first_step = last_step = 0
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                figures = json.loads(line)
                if figures["kind"] == "start":  # earlier runs may have other settings
                    rows = []
                    first_step = last_step = figures["step"]
                if figures["kind"] != "train":
                    continue
                previous, last_step = last_step, figures["step"]
                if previous < first_step + WARM_UP_STEPS:
                    continue
                rank_values = np.array(figures["counts_after"], dtype=np.float64)
                in_seconds = [milliseconds / 1e3 for milliseconds in figures["compute_ms"]]
                rows += [(*row, time) for row, time in zip(rank_values.tolist(), in_seconds, strict=True)]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a line of a training log: {error!r}") from error
        return rows

    def fit(self) -> Cost:
        """Fits a cost to these steps. Raises a ValueError as `fit_cost` does."""
        return fit_cost(self.counts, self.seconds)

    def errors(self, cost: Cost) -> np.ndarray:
        """Returns the relative error of each step's predicted time, float64 `[steps]`."""
        return np.abs(cost.step_seconds(self.counts) / self.seconds - 1)

    def errors_of_loads(self, fitted_to: MeasuredSteps) -> np.ndarray:
        """Returns each step's relative error if load × the median rate of `fitted_to` predicts its time."""
        loads, fitted_loads = (steps.counts[:, NUM_OTHERS:].sum(1) for steps in (self, fitted_to))
        per_load = np.median(fitted_to.seconds / np.maximum(fitted_loads, 1))
        return np.abs(loads * per_load / self.seconds - 1)


def summary(cost: Cost, steps: MeasuredSteps) -> str:
    """Returns a text with the cost and its error, and a warning if all columns are linear in tokens."""
    load_values = float(np.median(steps.errors_of_loads(steps)))
    per_sample, per_token, *per_unit = cost.coefficients
    columns = " + ".join(f"{unit:.3g} ns · w{column}" for column, unit in enumerate(per_unit))
    lines = [
        f"a step: {cost.per_step / 1e6:.3g} ms, and for each sample of T tokens and workloads w "
        f"{per_sample / 1e3:.3g} µs + {per_token / 1e3:.3g} µs · T + {columns}",
        f"median error over {len(steps.seconds)} steps: {cost.median_error:.1%}; "
        f"of times proportional to the workloads: {load_values:.1%}",
    ]
    return "\n".join([*lines, LINEAR] if is_linear(steps.counts) else lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Reads logs, fits a cost to them, writes it, and prints a summary."""
    parser = argparse.ArgumentParser(prog="calibrate", description="Fits sample costs to logged steps.")
    parser.add_argument("out", type=local_path, help="file to write, for TrainerArgs.balance_cost")
    parser.add_argument("logs", type=local_path, nargs="+", help="train.jsonl of a run's log_dir")
    arguments = parser.parse_args(argv)
    try:
        steps = MeasuredSteps.of([row for path in arguments.logs for row in MeasuredSteps.read(path)])
        try:
            cost = steps.fit()
        except ValueError as error:
            logs = ", ".join(map(str, arguments.logs))
            raise ValueError(f"{logs}, the last run after {WARM_UP_STEPS} steps: {error}") from error
        cost.save(arguments.out)
    except (ValueError, OSError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        sys.exit(2)
    print(summary(cost, steps))


if __name__ == "__main__":
    main()
