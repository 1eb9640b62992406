"""Figures of balance and waiting, averaged over windows of steps, for training loops of your own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .distributed import BalanceReport
from .distributed.ranks import RankGroup
from .perf_model.compute_clock import ComputeClock, ComputeSpan

__all__ = ["BalanceMeter"]

# Figures of reports, and of extensions, that are summed over a window.
_SUMMED_OF_EXTENSIONS = ("bytes_fetched", "fetch_seconds")
_SUMMED = ("bytes_sent", "bytes_received", "load_seconds", "plan_wait_seconds", "exchange_seconds")


class BalanceMeter:
    """Measures the steps of a pipeline, and averages them over all ranks at the end of each window.

    Call `meter.step()` after each `pipeline.progress(…)`. It returns True at the end of a window:

        if meter.step() and dist.get_rank() == 0:
            for name, value in meter.scalars().items():
                writer.add_scalar(name, value, step)

    A window costs one gather of host numbers and one host-device synchronization. It shows which rank was
    slowest, and by how much. Compute time is the forward and backward of the model's dense part, without
    waits for other ranks. The hooks that measure it stay on the model. Construction is collective.

    Args:
        pipeline: pipeline that trains with the stage in it.
        window: number of steps in a window.

    Attributes:
        figures: figures of the last window, by name. Lists have one entry per rank. Empty at first.

    Raises:
        ValueError: `window` is less than 1.
    """

    def __init__(self, pipeline: Any, window: int = 100) -> None:
        if window < 1:
            raise ValueError(f"window={window}; expected a number of steps of at least 1")
        shuffler = pipeline._stage._shuffler
        self._pipeline, self._window = pipeline, window
        group = shuffler.group  # not the shuffler, whose model the clock would then keep alive
        device = torch.device(pipeline._device)
        self._clock = ComputeClock.of(pipeline._model, device, lambda: group.wait_seconds)
        self._channel = RankGroup.of().channel()
        self.figures: dict[str, Any] = {}
        self._loss_sum: torch.Tensor | float
        self._span: ComputeSpan
        self._begin_window()

    def step(self) -> bool:
        """Adds the figures of the step that has just run, and returns whether a window ended. The end of a
        window is collective."""
        self.add()
        if len(self._reports) < self._window:
            return False
        self.close()
        return True

    def scalars(self) -> dict[str, float]:
        """Returns the last window's numbers for a logger, and the largest and mean of lists of numbers."""
        found: dict[str, float] = {}
        for name, value in self.figures.items():
            if isinstance(value, int | float):
                found[name] = value
            elif isinstance(value, list) and not isinstance(value[0], list):
                found |= {f"{name}/largest": max(value), f"{name}/mean": sum(value) / len(value)}
        return found

    def add(self, **amounts: float) -> None:
        """Adds the figures of the step that has just run, and other amounts of this rank, to the window."""
        pipeline = self._pipeline
        # A sum on the device, so that nothing waits. A loop may have reduced `loss_sum` over ranks in place.
        self._loss_sum = self._loss_sum + pipeline._stage.last.own_loss_sum.double()
        self._loss_tokens += pipeline.loss_tokens
        self._reports.append(pipeline.report)
        self._spans.append(self._span)
        for name, amount in amounts.items():
            self._amounts[name] = self._amounts.get(name, 0.0) + amount
        self._span = self._clock.begin()

    def close(self, **last: float) -> dict[str, Any]:
        """Ends the window after any number of steps. Returns `figures`, unchanged after 0 steps. Collective.
        `last` has amounts of this rank at the end of the window, such as its peak memory."""
        if not self._reports:
            return self.figures
        of_rank = {**self._sums(), **self._amounts, **last}
        of_ranks = self._channel.all_gather_objects(of_rank)
        seconds = time.perf_counter() - self._start
        self.figures = window_figures(seconds, self._loss_tokens, self._reports, of_ranks)
        for name in (*self._amounts, *last):
            self.figures[name] = [sums[name] for sums in of_ranks]
        self._begin_window()
        return self.figures

    def pause(self, seconds: float) -> None:
        """Leaves out seconds in which something else ran, such as an evaluation."""
        self._start += seconds

    def _begin_window(self) -> None:
        self._start = time.perf_counter()
        self._loss_sum = 0.0
        self._loss_tokens: int | float = 0
        self._reports: list[BalanceReport] = []
        self._spans: list[ComputeSpan] = []
        self._amounts: dict[str, float] = {}
        self._span = self._clock.begin()

    def _sums(self) -> dict[str, Any]:
        """Returns the window's figures that differ by rank. Waits for the device."""
        reports, rank = self._reports, self._pipeline._stage.rank
        return {
            "loss": float(self._loss_sum),
            **figures_of_rank(reports, rank),
            # All ranks that exchange report the same samples, so only their rank 0 counts them.
            "samples_cut": 0 if rank else _sum_of(reports, "samples_cut"),
            "pieces": 0 if rank else _sum_of(reports, "pieces"),
            **{name: sum(getattr(report, name) for report in reports) for name in _SUMMED},
            **{name: _sum_of(reports, name) for name in _SUMMED_OF_EXTENSIONS},
            "compute_seconds": [span.seconds() for span in self._spans],
        }


def figures_of_rank(reports: Sequence[BalanceReport], rank: int) -> dict[str, Any]:
    """Returns one rank's figures from reports, by name, each a list with one entry per step.

    `predicted_seconds` is left out if any report has none. `extensions` are figures to average, by name.
    """
    names = ["counts_after", "loads_after", "tokens_before", "tokens_after"]
    if all(report.predicted_seconds is not None for report in reports):
        names.append("predicted_seconds")
    figures = {name: [getattr(report, name)[rank].tolist() for report in reports] for name in names}
    figures["speeds"] = [float(_relative_speeds(report)[rank]) for report in reports]
    figures["extensions"] = [
        {
            name: float(value)
            for name, value in report.extensions.items()
            if isinstance(value, float) and name not in _SUMMED_OF_EXTENSIONS
        }
        for report in reports
    ]
    return figures


def _relative_speeds(report: BalanceReport) -> np.ndarray:
    """Returns the speeds that loads are proportional to, float64 `[ranks]`, with a geometric mean of 1."""
    speeds = np.ones(len(report.loads_after)) if report.speeds is None else report.speeds
    return speeds / np.exp(np.log(speeds).mean())


def window_figures(
    seconds: float,
    loss_tokens: int | float,
    reports: Sequence[BalanceReport],
    of_ranks: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Returns the figures of a window by name, which docs/watching-a-run.md explains. Lists have one entry
    per rank.

    If the measured imbalance exceeds the planned one, the costs did not predict the times. `imbalance_bound`,
    which no placement of whole samples beats, is given if samples are cut and all ranks exchange together.

    `loss_tokens` are those of all ranks and steps. `of_ranks` has the figures of each rank by name: sums over
    the steps, and lists with one entry per step, which are its compute times and `figures_of_rank`.
    """
    num_ranks, num_steps = len(of_ranks), len(reports)
    compute_seconds, tokens_before, tokens_after, counts = (
        np.array([sums[name] for sums in of_ranks])
        for name in ("compute_seconds", "tokens_before", "tokens_after", "counts_after")
    )
    slowest = compute_seconds.max(0)
    times_slowest = np.bincount(compute_seconds.argmax(0), minlength=num_ranks)

    def total(name: str) -> float:
        return sum(sums[name] for sums in of_ranks)

    def mean_of_rank(name: str) -> list[Any]:
        return rounded(np.mean([sums[name] for sums in of_ranks], 1))

    def mean(name: str) -> float:
        return total(name) / (num_ranks * num_steps)

    figures = {
        "loss": total("loss") / loss_tokens if loss_tokens else 0.0,
        "seconds": seconds,
        "seconds_per_step": seconds / num_steps,
        "samples_per_second": float(counts[..., 0].sum()) / seconds,
        "tokens_per_second": int(tokens_before.sum()) / seconds,
        "imbalance_before": _mean_of(reports, "job_imbalance_before"),
        "imbalance_after": _mean_of(reports, "job_imbalance_after"),
        "imbalance_measured": _imbalance(compute_seconds),
        "token_imbalance_before": _imbalance(tokens_before),
        "token_imbalance_after": _imbalance(tokens_after),
        "slowest_rank": int(times_slowest.argmax()),
        "slowest_share": float(times_slowest.max() / num_steps),
        "slowest_ms": float(slowest.mean() * 1e3),
        "micro_batches": _sum_of(reports, "micro_batches", without=1) / num_steps,
        "samples_cut": total("samples_cut") / num_steps,
        "pieces": total("pieces") / num_steps,
        **{f"{name}_ms": mean(f"{name}_seconds") * 1e3 for name in ("plan_wait", "exchange", "fetch")},
        "other_ms": float(seconds - slowest.sum()) / num_steps * 1e3,
        **{name: mean(name) for name in ("bytes_sent", "bytes_received", "bytes_fetched")},
        "compute_ms": rounded(compute_seconds.mean(1) * 1e3),
        "load_ms": rounded(np.array([sums["load_seconds"] for sums in of_ranks]) / num_steps * 1e3),
        "waiting_ms": rounded((slowest - compute_seconds).mean(1) * 1e3),
        **{name: mean_of_rank(name) for name in ("tokens_before", "tokens_after", "loads_after")},
        "unit": reports[-1].unit,
        "samples_after": [of_rank[0] for of_rank in mean_of_rank("counts_after")],
        "counts_after": mean_of_rank("counts_after"),
    }
    if all("predicted_seconds" in sums for sums in of_ranks):
        figures["predicted_ms"] = rounded(np.mean([sums["predicted_seconds"] for sums in of_ranks], 1) * 1e3)
        figures["speeds"] = mean_of_rank("speeds")
    of_extensions = [of_step for sums in of_ranks for of_step in sums["extensions"]]
    for name in dict.fromkeys(itertools.chain.from_iterable(of_extensions)):
        values = [of_step[name] for of_step in of_extensions if name in of_step]
        figures.setdefault(name, float(np.mean(values)))
    is_of_all = all(len(report.loads_after) == num_ranks for report in reports)
    if figures["samples_cut"] and is_of_all:  # the bound takes time to compute
        figures["imbalance_bound"] = _mean_of(reports, "lower_bound")
    return figures


def rounded(values: np.ndarray) -> list[Any]:
    """Returns numbers as lists, rounded to thousandths, because further digits carry no information."""
    return np.round(values, 3).tolist()


def _imbalance(loads: np.ndarray) -> float:
    """Returns the sum of largest loads ÷ the sum of mean loads over steps. `loads` are `[ranks, steps]`."""
    mean = loads.mean(0).sum()
    return float(loads.max(0).sum() / mean) if mean else 1.0


def _mean_of(reports: Sequence[BalanceReport], name: str) -> float:
    """Returns the mean of an imbalance over steps, weighted by each step's total load, as in `_imbalance`.
    With weights that are the same before and after, the means' ratio is that of the steps' largest loads."""
    totals = [report.job_total_load or report.job_loads_after.sum() for report in reports]
    largest = sum(total * getattr(report, name) for total, report in zip(totals, reports, strict=True))
    return float(largest / sum(totals)) if sum(totals) else 1.0


def _sum_of(reports: Sequence[BalanceReport], figure: str, without: float = 0) -> float:
    """Returns the sum of an extension's figure, where steps without the extension count as `without`."""
    return sum(report.extensions.get(figure, without) for report in reports)
