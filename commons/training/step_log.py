"""What a user sees of training: a progress bar, a line every so many steps, and the same as JSON lines."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from commons.distributed import BalanceReport
from commons.pipeline.shuffle_stage import StepOutput

# A training step computes the forward pass once and, in backward, two products of the same size for each.
TRAINING_FLOPS_PER_FORWARD = 3


class StepLog:
    """Sums figures of steps over an interval and over ranks, and shows them on rank 0.

    Costs one all-reduce of host numbers, and one host-device synchronisation, per interval.

    Args:
        num_steps: steps of the run.
        interval: steps between lines.
        path: file to append JSON lines to.
        first_step: steps that were done before this process.
    """

    def __init__(self, num_steps: int, interval: int, path: Path, first_step: int = 0) -> None:
        self._num_steps = num_steps
        self._interval = interval
        self._group = dist.new_group(backend="gloo")
        self._bar: tqdm | None = None
        self._file = None
        if dist.get_rank() == 0:
            self._bar = tqdm(
                total=num_steps, initial=first_step, unit="step", desc="train", dynamic_ncols=True
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")
        self._step = first_step
        self._start_interval()

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            self._file.close()

    def step(self, output: StepOutput, report: BalanceReport, samples: int, forward_flops: float) -> None:
        """Takes one step's figures; `samples` and `forward_flops` are those that this rank loaded."""
        loss_sum, loss_tokens, _ = output
        self._step += 1
        self._loss_sum += loss_sum.double()
        self._loss_tokens += loss_tokens
        self._reports.append(report)
        self._samples += samples
        self._forward_flops += forward_flops
        if self._bar is not None:
            self._bar.update()
        if self._step % self._interval == 0 or self._step == self._num_steps:
            self._end_interval()

    def write(self, kind: str, figures: dict[str, Any], text: str = "") -> None:
        """Shows `text`, if there is any, and writes the figures, on rank 0."""
        if self._file is not None:
            if text:
                tqdm.write(text)
            self._file.write(json.dumps({"kind": kind, "step": self._step, **figures}) + "\n")
            self._file.flush()

    def pause(self) -> None:
        """Leaves the time until `resume` out of the figures."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Ends a `pause`."""
        self._start += time.perf_counter() - self._paused_at

    def _start_interval(self) -> None:
        self._loss_sum: torch.Tensor | float = 0.0
        self._loss_tokens = 0
        self._samples = 0
        self._forward_flops = 0.0
        self._reports: list[BalanceReport] = []
        self._start = time.perf_counter()

    def _end_interval(self) -> None:
        reports = self._reports
        of_this_rank = [
            float(self._loss_sum),
            self._samples,
            self._forward_flops,
            sum(report.bytes_sent for report in reports),
            sum(report.bytes_received for report in reports),
            sum(report.plan_wait_seconds for report in reports),
            sum(report.exchange_seconds for report in reports),
        ]
        sums = torch.tensor(of_this_rank, dtype=torch.float64)
        dist.all_reduce(sums, group=self._group)
        loss_sum, samples, forward_flops = sums[:3].tolist()
        per_rank_and_step = sums[3:] / (dist.get_world_size() * len(reports))
        bytes_sent, bytes_received, plan_wait, exchange = per_rank_and_step.tolist()
        seconds = time.perf_counter() - self._start
        figures = {
            "loss": loss_sum / max(self._loss_tokens, 1),
            "seconds_per_step": seconds / len(reports),
            "samples_per_second": samples / seconds,
            "tokens_per_second": sum(int(report.tokens_before.sum()) for report in reports) / seconds,
            "tflops": TRAINING_FLOPS_PER_FORWARD * forward_flops / seconds / 1e12,
            "imbalance_before": _imbalance([report.loads_before for report in reports]),
            "imbalance_after": _imbalance([report.loads_after for report in reports]),
            "micro_batches": sum(report.num_micro_batches for report in reports) / len(reports),
            "plan_wait_ms": plan_wait * 1e3,
            "exchange_ms": exchange * 1e3,
            "bytes_sent": bytes_sent,
            "bytes_received": bytes_received,
        }
        divided = figures["micro_batches"]
        waited, moved = f"plan {plan_wait * 1e3:.1f} ms", f"exchange {exchange * 1e3:.1f} ms"
        stage = f"  {waited}, {moved}, {bytes_sent / 1e3:.0f} kB sent" if bytes_sent else ""
        self.write(
            "train",
            figures,
            f"step {self._step}  loss {figures['loss']:.4f}  {figures['samples_per_second']:.0f} samples/s  "
            f"{figures['tokens_per_second']:.0f} tokens/s  {figures['tflops']:.3g} TFLOP/s  "
            f"imbalance {figures['imbalance_before']:.3f} → {figures['imbalance_after']:.3f}"
            + (f"  {divided:.3g} micro-batches" if divided > 1 else "")
            + stage,
        )
        self._start_interval()


def _imbalance(loads: list[np.ndarray]) -> float:
    """Largest ÷ mean load of several steps: the largest of each add up, as time does."""
    mean = sum(of_step.mean() for of_step in loads)
    return float(sum(of_step.max() for of_step in loads) / mean) if mean else 1.0


class LoadCounter:
    """Passes batches on and remembers, in order, how many samples and FLOPs each had.

    Pipelines load batches some steps before they compute them.
    """

    def __init__(self, flops: Any, check: Any) -> None:
        self._flops = flops
        self._check = check
        self._loaded: deque[tuple[int, float]] = deque()

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, each checked and counted."""
        for batch in batches:
            self._check(batch)
            flops = self._flops(batch)[: batch.num_samples]
            self._loaded.append((batch.num_samples, float(flops.sum(dtype=torch.float64))))
            yield batch

    def next_step(self) -> tuple[int, float]:
        """Samples and forward FLOPs of the oldest batch not asked for yet; zeros if there is none."""
        return self._loaded.popleft() if self._loaded else (0, 0)
