"""Traces of selected steps, from torch.profiler or Nsight Systems."""

from __future__ import annotations

import gzip
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from tqdm import tqdm

from ..named_ranges import unfollowed_threads_through
from .run_log import warn_once
from .training_args import TrainerArgs

logger = logging.getLogger(__name__)


class RangeOfThread(NamedTuple):
    """A recorded range of a thread. The id is the operating system's, and times are since the epoch."""

    name: str
    thread: str
    thread_id: int
    start_ns: int
    end_ns: int


class StepTraces:
    """Traces the steps that the arguments select, if any, on this rank.

    torch.profiler writes `<log_dir>/traces/rank<rank>.json.gz` after the last selected step, or when training
    ends earlier. Under Nsight Systems, which cannot share a GPU with torch.profiler, starts and stops
    Nsight's capture instead, with NVTX ranges. `first_step` steps were done before this process.
    """

    def __init__(self, args: TrainerArgs, first_step: int, num_steps: int, device: torch.device) -> None:
        self._start, self._end = max(args.profile_step_start, first_step + 1), args.profile_step_end
        self._profile: profile | None = None
        self._traced, self._step_range = ExitStack(), ExitStack()
        self._ranges: list[RangeOfThread] = []
        self._path = Path(args.log_dir) / "traces" / f"rank{dist.get_rank()}.json.gz"
        if not args.profile:
            self._end = 0
        elif self._start >= self._end or self._start > num_steps:
            warn_once(
                f"TrainerArgs.profile writes no trace: it selects steps {args.profile_step_start} to "
                f"{self._end - 1}, and this run does {first_step + 1} to {num_steps}"
            )
            self._end = 0
        elif not (device.type == "cuda" and "NSYS_PROFILING_SESSION_ID" in os.environ):
            # Keeps the profiler, which reads this on first use, from printing a line at its start and end.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            on_device = [ProfilerActivity.CUDA] if device.type == "cuda" else []
            # Prepares the trace a step early, because that disturbs the next step.
            selected = schedule(wait=self._start - 1, warmup=1, active=self._end - self._start, repeat=1)
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *on_device], schedule=selected, on_trace_ready=self._write
            )
            self._profile.step_num = first_step  # its steps are named as the run's are

    def __enter__(self) -> StepTraces:
        if self._profile is not None:
            self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._step_range.close()
        self._traced.close()
        if self._profile is not None:
            self._profile.stop()

    def before_step(self, step: int) -> None:
        """Starts, continues, or stops the trace. Call this before each step; steps count from 1."""
        self._step_range.close()
        if step == self._end:
            self._traced.close()
        if self._profile is not None:
            self._profile.step()
        if step == self._start < self._end:
            # torch.profiler follows the thread that starts it, and those of its backward and collectives. It
            # can follow all, but torch 2.13 then may crash if the profiler stops while one computes.
            of_other_threads = unfollowed_threads_through(partial(_noted_range, self._ranges))
            self._traced.enter_context(of_other_threads if self._profile else _nsight_capture())
        if self._profile is None and self._start <= step < self._end:
            self._step_range.enter_context(record_function(f"ProfilerStep#{step}"))

    def _write(self, stopped: profile) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            plain = self._path.with_suffix("")
            stopped.export_chrome_trace(str(plain))
            with plain.open() as lines, gzip.open(self._path, "wt", compresslevel=5) as compressed:
                compressed.writelines(_with_ranges(lines, self._ranges))
            plain.unlink()
        except OSError as error:  # such as a full disk, which must not end training
            logger.warning(f"the trace {self._path} was not written: {error}")
            return
        if dist.get_rank() == 0:
            tqdm.write(f"traces of each rank are in {self._path.parent}")


def _with_ranges(lines: Iterator[str], ranges: Sequence[RangeOfThread]) -> Iterator[str]:
    """Adds the ranges to a trace line by line, because a parsed trace may be far larger than memory."""
    base_ns = 0
    for line in lines:
        yield line
        key, _, value = line.strip().rstrip(",").partition(": ")
        if key == '"baseTimeNanoseconds"':
            base_ns = int(value)
        elif key == '"traceEvents"':
            yield from (json.dumps(event) + ",\n" for event in _events(ranges, base_ns))


def _events(ranges: Sequence[RangeOfThread], base_ns: int) -> Iterator[dict[str, Any]]:
    """Yields the ranges and their threads in the trace's format. Times are microseconds from `base_ns`."""
    process = os.getpid()
    for thread_id, thread in {noted.thread_id: noted.thread for noted in ranges}.items():
        metadata = {"ph": "M", "pid": process, "tid": thread_id}
        yield {**metadata, "name": "thread_name", "args": {"name": f"thread {thread_id} ({thread})"}}
        yield {**metadata, "name": "thread_sort_index", "args": {"sort_index": thread_id}}
    for noted in ranges:
        yield {
            "ph": "X",
            "cat": "user_annotation",
            "name": noted.name,
            "pid": process,
            "tid": noted.thread_id,
            "ts": (noted.start_ns - base_ns) / 1e3,
            "dur": (noted.end_ns - noted.start_ns) / 1e3,
        }


@contextmanager
def _nsight_capture() -> Iterator[None]:
    """While active, `nsys profile --capture-range=cudaProfilerApi` captures. All stages are NVTX ranges."""
    torch.cuda.profiler.start()
    with torch.autograd.profiler.emit_nvtx(), unfollowed_threads_through(torch.cuda.nvtx.range):
        yield
    torch.cuda.profiler.stop()


@contextmanager
def _noted_range(ended: list[RangeOfThread], name: str) -> Iterator[None]:
    """Records the enclosed code as a range, and appends it to `ended`, which is ordered by end time."""
    start = time.time_ns()
    try:
        yield
    finally:
        thread = threading.current_thread()
        ended.append(RangeOfThread(name, thread.name, threading.get_native_id(), start, time.time_ns()))
