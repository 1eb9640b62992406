"""The log of a run: warnings, lines of text, a progress bar, JSON lines and TensorBoard, all from rank 0."""

from __future__ import annotations

import json
import logging
import math
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from ..distributed import BalanceReport
from ..distributed.rank_group import RankGroup
from ..perf_model.compute_clock import ComputeSpan

logger = logging.getLogger(__name__)
_warned: set[str] = set()
# In `log_dir`.
LINES, TENSORBOARD = "train.jsonl", "tensorboard"

# A training step computes the forward pass once and, in backward, two products of the same size for each.
TRAINING_FLOPS_PER_FORWARD = 3
# Figures shown per rank in TensorBoard, in jobs of at most 16 ranks: more curves are unreadable.
_SHOWN_BY_RANK, _MOST_SHOWN_RANKS = ("compute_ms", "predicted_ms", "speeds"), 16


def warn_once(*messages: str) -> None:
    """Logs each message on rank 0, unless it has been logged before."""
    for message in messages:
        if message not in _warned and dist.get_rank() == 0:
            logger.warning(message)
        _warned.add(message)


class RunRecord:
    """Shows and writes figures on rank 0; does nothing on other ranks.

    Args:
        folder: folder of `train.jsonl`, which is appended to, and `tensorboard`.
        num_steps: steps of the run.
        first_step: steps done before this process. TensorBoard drops figures of later steps.
    """

    def __init__(self, folder: Path, num_steps: int, first_step: int) -> None:
        self._here = dist.get_rank() == 0
        if not self._here:
            return
        self._lines, self._scalars = folder / LINES, folder / TENSORBOARD
        # Without a terminal the lines of the log tell how far the run is.
        self._bar = tqdm(
            total=num_steps, initial=first_step, unit="step", desc="train", dynamic_ncols=True, disable=None
        )
        self._file = self._lines.open("a")
        self._tensorboard = SummaryWriter(str(self._scalars), purge_step=first_step + 1)
        self._lost: set[Path] = set()

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, *_: object) -> None:
        if self._here:
            self._bar.close()
            self._unless_lost(self._lines, self._file.close)
            self._unless_lost(self._scalars, self._tensorboard.close)

    def advance(self) -> None:
        """Moves the progress bar by a step."""
        if self._here:
            self._bar.update()

    def write(self, kind: str, step: int, figures: dict[str, Any], text: str = "") -> None:
        """Writes figures of a step, and shows `text` unless it is empty.

        Numbers that are not finite are `null` in JSON, which has no other word for them, and left out of
        TensorBoard. TensorBoard shows a number as the scalar `kind/name`, and a list with one number per rank
        as `kind/name/largest` and `kind/name/mean`; times and speeds of few ranks also as `kind/name/rank_0`
        and so on. Anything else is in the JSON lines alone.
        """
        if not self._here:
            return
        if text:
            tqdm.write(text)
        self._unless_lost(self._lines, lambda: self._write_line(kind, step, figures))
        self._unless_lost(self._scalars, lambda: self._write_scalars(kind, step, figures))

    def _unless_lost(self, path: Path, write: Callable[[], None]) -> None:
        """Writes, unless that failed before: a full disk costs figures, but not the training."""
        if path in self._lost:
            return
        try:
            write()
        except OSError as error:
            self._lost.add(path)
            logger.warning(f"figures are no longer written to {path}: {error}")

    def _write_line(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }
        self._file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
        self._file.flush()

    def _write_scalars(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        for name, value in figures.items():
            scalars = {}
            if isinstance(value, list) and not isinstance(value[0], list):
                scalars = {f"{name}/largest": max(value), f"{name}/mean": sum(value) / len(value)}
                if name in _SHOWN_BY_RANK and len(value) <= _MOST_SHOWN_RANKS:
                    scalars |= {f"{name}/rank_{rank}": figure for rank, figure in enumerate(value)}
            elif isinstance(value, int | float):
                scalars = {name: value}
            for scalar, number in scalars.items():
                if math.isfinite(number):
                    self._tensorboard.add_scalar(f"{kind}/{scalar}", number, step)


@dataclass
class _Interval:
    """One rank's figures of the steps since the last line."""

    start: float = field(default_factory=time.perf_counter)
    loss_sum: torch.Tensor | float = 0.0
    loss_tokens: int | float = 0
    forward_flops: float = 0.0
    reports: list[BalanceReport] = field(default_factory=list)
    spans: list[ComputeSpan] = field(default_factory=list)

    def rank_sums(self) -> dict[str, Any]:
        """The figures that differ by rank, for `interval_figures`; waits for the device."""
        return {
            "loss": float(self.loss_sum),
            "forward_flops": self.forward_flops,
            "bytes_sent": sum(report.bytes_sent for report in self.reports),
            "bytes_received": sum(report.bytes_received for report in self.reports),
            "plan_wait_seconds": sum(report.plan_wait_seconds for report in self.reports),
            "exchange_seconds": sum(report.exchange_seconds for report in self.reports),
            "bytes_fetched": _sum_of(self.reports, "bytes_fetched"),
            "fetch_seconds": _sum_of(self.reports, "fetch_seconds"),
            "peak_memory_bytes": _peak_memory_bytes(),
            "compute_seconds": [span.seconds() for span in self.spans],
        }


class StepLog:
    """Gathers figures over an interval of steps and over ranks, and records them.

    Costs one gather of host numbers and one host-device synchronization per interval. Construction is
    collective.

    Args:
        record: where figures are written.
        num_steps: steps of the run.
        interval: steps between lines.
        first_step: steps done before this process.
        peak_flops: peak FLOP/s of one device; None if unknown.
    """

    def __init__(
        self,
        record: RunRecord,
        num_steps: int,
        interval: int,
        first_step: int = 0,
        peak_flops: float | None = None,
    ) -> None:
        self._record = record
        self._num_steps = num_steps
        self._interval_steps = interval
        self._peak_flops = peak_flops
        self._channel = RankGroup.of().channel()
        self._step = first_step
        self._interval = _Interval()

    def step(
        self,
        loss_sum: torch.Tensor,
        loss_tokens: int | float,
        forward_flops: float,
        report: BalanceReport,
        span: ComputeSpan,
    ) -> None:
        """Takes the figures of one step. Collective at the end of an interval.

        Args:
            loss_sum: this rank's loss sum, a scalar.
            loss_tokens: loss tokens of all ranks.
            forward_flops: forward FLOPs of the samples that this rank loaded.
            report: balance of the step.
            span: this rank's computation.
        """
        self._step += 1
        interval = self._interval
        interval.loss_sum = interval.loss_sum + loss_sum.double()  # on the device: nothing waits for it
        interval.loss_tokens += loss_tokens
        interval.forward_flops += forward_flops
        interval.reports.append(report)
        interval.spans.append(span)
        self._record.advance()
        if self._step % self._interval_steps == 0 or self._step == self._num_steps:
            rank_sums = self._channel.all_gather_objects(interval.rank_sums())
            seconds = time.perf_counter() - interval.start
            figures = interval_figures(
                seconds, interval.loss_tokens, interval.reports, rank_sums, self._peak_flops
            )
            self.write("train", figures, text_of(self._step, figures))
            self._interval = _Interval()

    def write(self, kind: str, figures: dict[str, Any], text: str = "", step: int | None = None) -> None:
        """Records other figures, by default of the last step."""
        self._record.write(kind, self._step if step is None else step, figures, text)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While active, time does not count."""
        start = time.perf_counter()
        yield
        self._interval.start += time.perf_counter() - start


def interval_figures(
    seconds: float,
    loss_tokens: int | float,
    reports: Sequence[BalanceReport],
    rank_sums: Sequence[dict[str, Any]],
    peak_flops: float | None,
) -> dict[str, Any]:
    """Returns the figures of an interval by name; lists have one entry per rank.

    `loads_after` are in `unit`. `counts_after` has each rank's samples, tokens, and columns of
    `get_workloads`, to calibrate by. `imbalance_*` is the largest load ÷ the mean load: as loaded, as
    planned, and as measured in compute time. Where speeds differ, loads are divided by them.
    `token_imbalance_*` are tokens of the fullest rank ÷ the mean, as loaded and as planned.
    Where samples are cut, `imbalance_bound` is what no placement of whole ones beats. Where the measured one
    exceeds the planned one, the costs did not predict it. A rank's `waiting_ms` is how much
    the slowest rank's compute time exceeds its own. `other_ms` is the rest of a step beyond the slowest
    rank's computation: lookups, communication, optimizer, input, checkpoints.

    Args:
        seconds: duration of the interval.
        loss_tokens: loss tokens of all ranks and steps.
        reports: balance of each step.
        rank_sums: for each rank, sums over the steps by name, the peak memory, and the compute time of each
            step.
        peak_flops: peak FLOP/s of one device; None if unknown.
    """
    num_ranks, num_steps = len(rank_sums), len(reports)
    compute_seconds = np.array([sums["compute_seconds"] for sums in rank_sums])
    slowest = compute_seconds.max(0)

    def total(name: str) -> float:
        return sum(sums[name] for sums in rank_sums)

    def scale_each_rank(name: str, scale: float) -> list[float]:
        return _rounded(np.array([sums[name] for sums in rank_sums]) * scale)

    def mean_over_reports(name: str) -> list[Any]:
        return _rounded(np.mean([getattr(report, name) for report in reports], 0))

    flops_per_second = TRAINING_FLOPS_PER_FORWARD * total("forward_flops") / seconds
    per_step = 1 / (num_ranks * num_steps)
    figures = {
        "loss": total("loss") / loss_tokens if loss_tokens else 0.0,
        "seconds_per_step": seconds / num_steps,
        "samples_per_second": sum(len(report.workloads) for report in reports) / seconds,
        "tokens_per_second": sum(int(report.tokens_before.sum()) for report in reports) / seconds,
        "tflops": flops_per_second / 1e12,
        "imbalance_before": _mean_of(reports, "imbalance_before"),
        "imbalance_after": _mean_of(reports, "imbalance_after"),
        "imbalance_measured": _imbalance(list(compute_seconds.T)),
        "token_imbalance_before": _imbalance([report.tokens_before for report in reports]),
        "token_imbalance_after": _imbalance([report.tokens_after for report in reports]),
        "micro_batches": _sum_of(reports, "micro_batches", without=1) / num_steps,
        "samples_cut": _sum_of(reports, "samples_cut") / num_steps,
        "pieces": _sum_of(reports, "pieces") / num_steps,
        "plan_wait_ms": total("plan_wait_seconds") * per_step * 1e3,
        "exchange_ms": total("exchange_seconds") * per_step * 1e3,
        "fetch_ms": total("fetch_seconds") * per_step * 1e3,
        "other_ms": float(seconds - slowest.sum()) / num_steps * 1e3,
        "bytes_sent": total("bytes_sent") * per_step,
        "bytes_received": total("bytes_received") * per_step,
        "bytes_fetched": total("bytes_fetched") * per_step,
        "compute_ms": _rounded(compute_seconds.mean(1) * 1e3),
        "waiting_ms": _rounded((slowest - compute_seconds).mean(1) * 1e3),
        "tokens_before": mean_over_reports("tokens_before"),
        "tokens_after": mean_over_reports("tokens_after"),
        "loads_after": mean_over_reports("loads_after"),
        "unit": reports[-1].unit,
        "samples_after": [counts[0] for counts in mean_over_reports("counts_after")],
        "counts_after": mean_over_reports("counts_after"),
        "peak_memory_mb": scale_each_rank("peak_memory_bytes", 1e-6),
    }
    predicted = [report.predicted_seconds for report in reports if report.predicted_seconds is not None]
    if predicted and len(predicted) == len(reports):
        figures["predicted_ms"] = _rounded(np.mean(predicted, 0) * 1e3)
        figures["speeds"] = _rounded(np.mean([report.rank_speeds for report in reports], 0))
    if figures["samples_cut"]:  # otherwise not worth its time
        figures["imbalance_bound"] = _mean_of(reports, "lower_bound")
    if peak_flops is not None:
        figures["mfu"] = flops_per_second / (num_ranks * peak_flops)
    return figures


def text_of(step: int, figures: dict[str, Any]) -> str:
    """Returns a line with the main ones of `interval_figures`."""
    utilization = f" ({figures['mfu']:.1%} MFU)" if "mfu" in figures else ""
    text = (
        f"step {step}  loss {figures['loss']:.4f}  {figures['samples_per_second']:.0f} samples/s  "
        f"{figures['tokens_per_second']:.0f} tokens/s  {figures['tflops']:.3g} TFLOP/s{utilization}  "
        f"imbalance {figures['imbalance_before']:.3f} → {figures['imbalance_after']:.3f} in "
        f"{figures['unit']}, measured {figures['imbalance_measured']:.3f}  "
        f"tokens {figures['token_imbalance_before']:.2f} → {figures['token_imbalance_after']:.2f}"
    )
    if "predicted_ms" in figures:
        slowest = int(np.argmax(figures["compute_ms"]))
        text += (
            f"  slowest rank {figures['compute_ms'][slowest]:.1f} ms, predicted "
            f"{figures['predicted_ms'][slowest]:.1f} ms"
        )
    if figures["micro_batches"] > 1:
        text += f"  {figures['micro_batches']:.3g} micro-batches"
    if figures["bytes_sent"]:
        waited, moved = figures["plan_wait_ms"], figures["exchange_ms"]
        text += f"  plan {waited:.1f} ms, exchange {moved:.1f} ms, {figures['bytes_sent'] / 1e3:.0f} kB sent"
    if figures["samples_cut"]:
        text += (
            f"  whole samples {figures['imbalance_bound']:.3f}  "
            f"{figures['samples_cut']:.3g} samples per step in {figures['pieces']:.3g} pieces, "
            f"fetch {figures['fetch_ms']:.1f} ms, {figures['bytes_fetched'] / 1e6:.3g} MB"
        )
    return text


def _imbalance(loads: Sequence[np.ndarray]) -> float:
    """Largest ÷ mean load over several steps: the largest of each step add up, as time does."""
    mean = sum(step_loads.mean() for step_loads in loads)
    return float(sum(step_loads.max() for step_loads in loads) / mean) if mean else 1.0


def _mean_of(reports: Sequence[BalanceReport], name: str) -> float:
    """The mean of an imbalance over steps, weighted by mean loads: the largest loads add up, as time does."""
    loads = "loads_before" if name == "imbalance_before" else "loads_after"
    means = [getattr(report, loads).mean() for report in reports]
    largest = sum(mean * getattr(report, name) for mean, report in zip(means, reports, strict=True))
    return float(largest / sum(means)) if sum(means) else 1.0


def _sum_of(reports: Sequence[BalanceReport], figure: str, without: float = 0) -> float:
    """The sum of a feature's figure, and of `without` for steps without the feature."""
    return sum(report.features.get(figure, without) for report in reports)


def _rounded(values: np.ndarray) -> list[float]:
    """Rounds for the JSON lines, where digits after a thousandth say nothing."""
    return np.round(values, 3).tolist()


def _peak_memory_bytes() -> int:
    """Peak tensor memory since the last call on CUDA, else peak memory of the process."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class FlopsCounter:
    """Passes batches on and remembers, in order, the forward FLOPs of each.

    Pipelines load batches several steps before they compute them.

    Args:
        flops: host batch to forward FLOPs, `[batch_size]` or `[batch_size, columns]`.
    """

    def __init__(self, flops: Callable[[Any], torch.Tensor]) -> None:
        self._flops = flops
        self._loaded: deque[float] = deque()

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches, each counted."""
        for batch in batches:
            flops = self._flops(batch)[: batch.num_samples]
            self._loaded.append(float(flops.sum(dtype=torch.float64)))
            yield batch

    def next_step(self) -> float:
        """Returns the FLOPs of the next batch in order; 0 if there is none."""
        return self._loaded.popleft() if self._loaded else 0.0
