"""Fits the cost of samples to training logs.

    python -m commons.perf_model.calibrate OUT.json LOG.jsonl...

LOG.jsonl is `train.jsonl` in a run's `log_dir`, of the same model on the same machine. Lines that cover a
single step (`TrainerArgs.log_interval = 1`) are the most informative.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from commons.perf_model.measured_cost import LEAST_STEPS, MeasuredCost

# First steps of a run. Their times include one-off costs: first allocations, compilation of kernels.
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class MeasuredSteps:
    """Measured steps of single ranks, or means of several steps; each field is `[steps]` float64.

    Attributes:
        samples: samples that the rank computed.
        tokens: sum of their tokens T.
        squared_tokens: sum of their T².
        loads: sum of their workloads.
        seconds: time of forward and backward, without waiting for other ranks.
    """

    samples: np.ndarray
    tokens: np.ndarray
    squared_tokens: np.ndarray
    loads: np.ndarray
    seconds: np.ndarray

    @staticmethod
    def of(rows: Sequence[Sequence[float]]) -> MeasuredSteps:
        """Builds from rows per step: samples, tokens, squared tokens, load, seconds (0 if not measured)."""
        columns = np.array(rows, dtype=np.float64).reshape(-1, 5).T
        return MeasuredSteps(*columns[:, columns[4] > 0])

    @staticmethod
    def read(path: Path) -> MeasuredSteps:
        """Reads the last run in a training log, without its first steps.

        Raises:
            ValueError: the file is not a training log; the message names the line.
        """
        rows: list[tuple[float, ...]] = []
        first_step = last_step = 0
        learned = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                figures = json.loads(line)
                if figures["kind"] == "start":  # earlier runs may have other settings
                    rows, learned = [], False
                    first_step = last_step = figures["step"]
                if figures["kind"] != "train":
                    continue
                previous, last_step = last_step, figures["step"]
                if previous < first_step + WARM_UP_STEPS or figures.get("samples_cut"):
                    continue  # a piece costs more than a sample of its tokens
                if "predicted_ms" in figures and not learned:  # loads are times from here on
                    rows, learned = [], True
                names = ("samples_after", "tokens_after", "squared_tokens_after", "loads_after")
                in_seconds = [milliseconds / 1e3 for milliseconds in figures["compute_ms"]]
                rows += zip(*(figures[name] for name in names), in_seconds, strict=True)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a line of a training log: {error!r}") from error
        return MeasuredSteps.of(rows)

    def every_other(self, first: int) -> MeasuredSteps:
        """Returns every other step from step 0 or 1: one half to fit, the other to validate."""
        halves = (getattr(self, column.name)[first::2] for column in dataclasses.fields(self))
        return MeasuredSteps(*halves)

    def fit(self) -> MeasuredCost:
        """Fits a cost to these steps.

        Raises:
            ValueError: there are fewer than four steps.
        """
        return MeasuredCost.fit(self.samples, self.tokens, self.squared_tokens, self.seconds)

    def errors(self, cost: MeasuredCost) -> np.ndarray:
        """Returns the relative error of each step's predicted time, float64 `[steps]`."""
        predicted = cost.step_seconds(self.samples, self.tokens, self.squared_tokens)
        return np.abs(predicted / self.seconds - 1)

    def errors_of_loads(self, fitted_to: MeasuredSteps) -> np.ndarray:
        """Returns the errors of times proportional to the loads, at the median rate of `fitted_to`."""
        per_load = np.median(fitted_to.seconds / np.maximum(fitted_to.loads, 1))
        return np.abs(self.loads * per_load / self.seconds - 1)


def summary(cost: MeasuredCost, steps: MeasuredSteps) -> str:
    """Returns two lines: the fitted cost, and its error."""
    of_loads = float(np.median(steps.errors_of_loads(steps)))
    return (
        f"a step of T tokens per sample: {cost.per_step * 1e3:.3g} ms, and for each sample "
        f"{cost.per_sample * 1e6:.3g} µs + {cost.per_token * 1e6:.3g} µs · T + "
        f"{cost.per_squared_token * 1e9:.3g} ns · T²\n"
        f"median error over {len(steps.seconds)} steps: {cost.median_error:.1%}; "
        f"of times proportional to the workloads: {of_loads:.1%}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Reads logs, writes the fitted cost, and prints it."""
    parser = argparse.ArgumentParser(prog="calibrate", description="Fits sample costs to logged steps.")
    parser.add_argument("out", type=Path, help="file to write, for TrainerArgs.balance_cost")
    parser.add_argument("logs", type=Path, nargs="+", help="train.jsonl of a run's log_dir")
    arguments = parser.parse_args(argv)
    try:
        read = [MeasuredSteps.read(path) for path in arguments.logs]
        names = [column.name for column in dataclasses.fields(MeasuredSteps)]
        steps = MeasuredSteps(*(np.concatenate([getattr(part, name) for part in read]) for name in names))
        if len(steps.seconds) < LEAST_STEPS:
            logs = ", ".join(map(str, arguments.logs))
            raise ValueError(
                f"{logs}: {len(steps.seconds)} measured steps; expected at least {LEAST_STEPS} in the last "
                f"run, after its first {WARM_UP_STEPS} steps"
            )
        cost = steps.fit()
        cost.save(arguments.out)
    except (ValueError, OSError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        sys.exit(2)
    print(summary(cost, steps))


if __name__ == "__main__":
    main()
