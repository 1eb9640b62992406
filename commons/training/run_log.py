"""The log of a run, from rank 0: warnings, text, a progress bar, JSON lines, and TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from ..balance_meter import BalanceMeter, rounded
from .training_args import TrainerArgs

logger = logging.getLogger(__name__)
_warned: set[str] = set()
# Names in `log_dir`.
LINES, TENSORBOARD = "train.jsonl", "tensorboard"

# For each matrix product of the forward pass, backward computes two of the same size.
TRAINING_FLOPS_PER_FORWARD = 3
# TensorBoard shows these figures per rank in jobs of at most 16 ranks, because more curves are unreadable.
_SHOWN_BY_RANK, _MOST_SHOWN_RANKS = ("compute_ms", "predicted_ms", "speeds"), 16


def warn_once(*messages: str) -> None:
    """Logs each message as a warning on rank 0, unless it has been logged before."""
    for message in messages:
        if message not in _warned and dist.get_rank() == 0:
            logger.warning(message)
        _warned.add(message)


class RunRecord:
    """Shows and writes figures on rank 0, and does nothing on other ranks.

    Args:
        folder: folder of `tensorboard`, and of `train.jsonl`, to which lines are appended.
        num_steps: steps of the whole run.
        first_step: steps completed before this process. TensorBoard drops older figures of steps after it.
    """

    def __init__(self, folder: Path, num_steps: int, first_step: int) -> None:
        self._here = dist.get_rank() == 0
        if not self._here:
            return
        self._lines, self._scalars = folder / LINES, folder / TENSORBOARD
        # Without a terminal there is no bar, because the log lines show the progress.
        self._bar = tqdm(
            total=num_steps, initial=first_step, unit="step", desc="train", dynamic_ncols=True, disable=None
        )
        try:
            self._file = self._lines.open("a")
            self._tensorboard = SummaryWriter(str(self._scalars), purge_step=first_step + 1)
        except OSError as error:
            raise OSError(f"TrainerArgs.log_dir = {str(folder)!r} cannot be written to: {error}") from error
        self._lost: set[Path] = set()

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, *_: object) -> None:
        if self._here:
            self._bar.close()
            self._unless_lost(self._lines, self._file.close)
            self._unless_lost(self._scalars, self._tensorboard.close)

    def advance(self) -> None:
        """Advances the progress bar by one step."""
        if self._here:
            self._bar.update()

    def write(self, kind: str, step: int, figures: dict[str, Any], text: str = "") -> None:
        """Writes the figures of a step, and prints `text` unless it is empty.

        TensorBoard shows a number as the scalar `kind/name`, and a list with one number per rank as
        `kind/name/largest` and `kind/name/mean`. In small jobs it also shows times and speeds as
        `kind/name/rank_0` and so on. All other figures are only in the JSON lines. A non-finite number is
        `null` in JSON, which cannot represent it, and TensorBoard omits it.
        """
        if not self._here:
            return
        if text:
            tqdm.write(text)
        self._unless_lost(self._lines, lambda: self._write_line(kind, step, figures))
        self._unless_lost(self._scalars, lambda: self._write_scalars(kind, step, figures))

    def _unless_lost(self, path: Path, write: Callable[[], None]) -> None:
        """Calls `write` unless it failed for `path` before: a full disk must not end the training."""
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


class StepLog:
    """Logs the figures of a pipeline's `BalanceMeter` over intervals of steps."""

    def __init__(self, record: RunRecord, meter: BalanceMeter, num_steps: int, args: TrainerArgs) -> None:
        self._record, self._meter, self._num_steps, self._args = record, meter, num_steps, args

    def step(self, step: int, forward_flops: float, stops: bool) -> None:
        """Adds the step that has just run. Collective at the end of an interval.

        `forward_flops` is the sum over the samples that this rank loaded. `stops` ends the interval early.
        """
        self._meter.add(forward_flops=forward_flops)
        self._record.advance()
        if step % self._args.log_interval == 0 or step == self._num_steps or stops:
            figures = self._meter.close(peak_memory_bytes=_peak_memory_bytes())
            figures = interval_figures(figures, self._args.peak_flops)
            self._record.write("train", step, figures, text_of(step, figures))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While active, the meter's clock is paused."""
        start = time.perf_counter()
        yield
        self._meter.pause(time.perf_counter() - start)


def interval_figures(figures: Mapping[str, Any], peak_flops: float | None) -> dict[str, Any]:
    """Returns a meter's figures, with TFLOP/s, MFU, and peak megabytes in place of FLOPs, seconds, and bytes.

    `peak_flops` is the peak FLOP/s of one device. None means unknown, and omits MFU.
    """
    shown = dict(figures)
    flops, peaks = shown.pop("forward_flops"), np.array(shown.pop("peak_memory_bytes"))
    flops_per_second = TRAINING_FLOPS_PER_FORWARD * sum(flops) / shown.pop("seconds")
    shown |= {"tflops": flops_per_second / 1e12, "peak_memory_mb": rounded(peaks * 1e-6)}
    if peak_flops is not None:
        shown["mfu"] = flops_per_second / (len(flops) * peak_flops)
    return shown


def text_of(step: int, figures: dict[str, Any]) -> str:
    """Returns a log line with the main figures of `interval_figures`."""
    utilization = f" ({figures['mfu']:.1%} MFU)" if "mfu" in figures else ""
    text = (
        f"step {step}  loss {figures['loss']:.4f}  {figures['samples_per_second']:.0f} samples/s  "
        f"{figures['tokens_per_second']:.0f} tokens/s  {figures['tflops']:.3g} TFLOP/s{utilization}  "
        f"imbalance {figures['imbalance_before']:.3f} -> {figures['imbalance_after']:.3f} in "
        f"{figures['unit']}, measured {figures['imbalance_measured']:.3f}  "
        f"tokens {figures['token_imbalance_before']:.2f} -> {figures['token_imbalance_after']:.2f}"
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
        if "imbalance_bound" in figures:
            text += f"  whole samples {figures['imbalance_bound']:.3f}"
        text += (
            f"  {figures['samples_cut']:.3g} samples per step in {figures['pieces']:.3g} pieces, "
            f"fetch {figures['fetch_ms']:.1f} ms, {figures['bytes_fetched'] / 1e6:.3g} MB"
        )
    return text


def _peak_memory_bytes() -> int:
    """Returns the peak memory of tensors since the last call, or without CUDA, of the process so far."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class FlopsCounter:
    """Passes batches through, and remembers the forward FLOPs of each one in order.

    Pipelines load batches several steps before they compute them. `flops` is `TrainingTask.flops`.
    """

    def __init__(self, flops: Callable[[Any], torch.Tensor]) -> None:
        self._flops = flops
        self._loaded: deque[float] = deque()

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches, and counts the FLOPs of each one."""
        for batch in batches:
            flops = self._flops(batch)[: batch.num_samples]
            self._loaded.append(float(flops.sum(dtype=torch.float64)))
            yield batch

    def next_step(self) -> float:
        """Returns the FLOPs of the next batch in order, or 0 if there is none."""
        return self._loaded.popleft() if self._loaded else 0.0
