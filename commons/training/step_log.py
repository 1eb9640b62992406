"""What a user sees of training: figures of every so many steps, over all ranks."""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed import BalanceReport
from commons.pipeline.shuffle_stage import StepOutput
from commons.training.compute_clock import ComputeSpan
from commons.training.run_record import RunRecord
from commons.training.step_figures import FIGURES_PER_RANK, RanksInterval, text_of


@dataclass
class _Interval:
    """What one rank knows of the steps since the last line."""

    loss_sum: torch.Tensor | float = 0.0
    loss_tokens: int = 0
    samples: int = 0
    forward_flops: float = 0.0
    reports: list[BalanceReport] = field(default_factory=list)
    spans: list[ComputeSpan | None] = field(default_factory=list)
    computed_tokens: list[np.ndarray] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)


class StepLog:
    """Gathers figures of steps over an interval and over ranks, and records them.

    Costs one all-gather of host numbers, and one host-device synchronisation, per interval. Made
    collectively.

    Args:
        record: where they go.
        num_steps: steps of the run.
        interval: steps between lines.
        first_step: steps that were done before this process.
        peak_flops: FLOP/s of one device at best; None if that is not known.
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
        self._group = dist.new_group(backend="gloo")
        self._step = first_step
        self._interval = _Interval()

    def step(
        self,
        output: StepOutput,
        report: BalanceReport,
        span: ComputeSpan | None,
        computed_tokens: np.ndarray,
        samples: int,
        forward_flops: float,
    ) -> None:
        """Takes one step's figures.

        Args:
            output, report, span, computed_tokens: as the pipeline has them.
            samples, forward_flops: that this rank loaded.
        """
        loss_sum, loss_tokens, _ = output
        self._step += 1
        interval = self._interval
        interval.loss_sum += loss_sum.double()
        interval.loss_tokens += loss_tokens
        interval.reports.append(report)
        interval.spans.append(span)
        interval.computed_tokens.append(computed_tokens)
        interval.samples += samples
        interval.forward_flops += forward_flops
        self._record.advance()
        if self._step % self._interval_steps == 0 or self._step == self._num_steps:
            self._end_interval()

    def write(self, kind: str, figures: dict[str, Any], text: str = "", step: int | None = None) -> None:
        """Records other figures, of the last step or another one."""
        self._record.write(kind, self._step if step is None else step, figures, text)

    def pause(self) -> None:
        """Leaves the time until `resume` out of the figures."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Ends a `pause`."""
        self._interval.start += time.perf_counter() - self._paused_at

    def _end_interval(self) -> None:
        interval = self._interval
        of_this_rank = [
            float(interval.loss_sum),
            interval.samples,
            interval.forward_flops,
            sum(report.bytes_sent for report in interval.reports),
            sum(report.bytes_received for report in interval.reports),
            sum(report.plan_wait_seconds for report in interval.reports),
            sum(report.exchange_seconds for report in interval.reports),
            _peak_memory_bytes(),
            len(computed_tokens := np.concatenate(interval.computed_tokens)),
            np.square(computed_tokens, dtype=np.float64).sum(),
            *(0.0 if span is None else span.seconds() for span in interval.spans),
        ]
        own = torch.tensor(of_this_rank, dtype=torch.float64)
        gathered = own.new_empty(dist.get_world_size() * len(own))
        dist.all_gather_into_tensor(gathered, own, group=self._group)
        of_ranks = gathered.view(-1, len(own)).numpy()
        ranks = RanksInterval(
            seconds=time.perf_counter() - interval.start,
            loss_tokens=interval.loss_tokens,
            reports=interval.reports,
            sums=of_ranks[:, :FIGURES_PER_RANK],
            compute_seconds=of_ranks[:, FIGURES_PER_RANK:],
        )
        figures = ranks.figures(self._peak_flops)
        self._record.write("train", self._step, figures, text_of(self._step, figures))
        self._interval = _Interval()


def _peak_memory_bytes() -> int:
    """On CUDA the most that tensors took since it was last asked for, else the most of the process ever."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
