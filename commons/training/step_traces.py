"""Traces of selected steps, from torch.profiler or Nsight Systems."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

from ..named_ranges import RangeOfThread, noted_range, unfollowed_threads_through
from .run_log import warn_once
from .training_args import TrainerArgs

logger = logging.getLogger(__name__)


class StepTraces:
    """Traces the steps that the arguments select, if any, on this rank.

    torch.profiler writes `<log_dir>/traces/rank<rank>.json.gz` after the last selected step, or when training
    ends earlier. Under Nsight Systems, which cannot share a GPU with torch.profiler, starts and stops
    Nsight's capture instead, with NVTX ranges. `first_step` steps were done before this process.
    """

    def __init__(self, args: TrainerArgs, first_step: int, num_steps: int, device: torch.device) -> None:
        self._first, self._end = args.profile_step_start, args.profile_step_end
        self._trace: AbstractContextManager[None] | None = None  # None if nothing is left to start
        self._profile: profile | None = None  # None if nothing is left to prepare
        self._active, self._step_range = ExitStack(), ExitStack()
        if not args.profile:
            self._end = 0
        elif self._end <= first_step + 1 or self._first > num_steps:
            warn_once(
                f"TrainerArgs.profile writes no trace: it selects steps {self._first} to {self._end - 1}, "
                f"and this run does {first_step + 1} to {num_steps}"
            )
            self._end = 0
        elif device.type == "cuda" and "NSYS_PROFILING_SESSION_ID" in os.environ:
            self._trace = _nsight_capture()
        else:
            # Keeps the profiler, which reads this on first use, from printing a line at its start and end.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            on_device = [ProfilerActivity.CUDA] if device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *on_device])
            path = Path(args.log_dir) / "traces" / f"rank{dist.get_rank()}.json.gz"
            self._trace = _torch_trace(self._profile, path)

    def __enter__(self) -> StepTraces:
        return self

    def __exit__(self, *_: object) -> None:
        self._step_range.close()
        self._active.close()

    def before_step(self, step: int) -> None:
        """Starts, continues, or stops the trace. Call this before each step; steps count from 1."""
        self._step_range.close()
        if step >= self._end:
            self._active.close()
            return
        if step >= self._first - 1 and self._profile is not None:
            self._profile.prepare_trace()  # a step early, because it disturbs the next step
            self._profile = None
        if step >= self._first:
            if self._trace is not None:
                self._active.enter_context(self._trace)
                self._trace = None
            # Trace viewers find steps by this name.
            self._step_range.enter_context(record_function(f"ProfilerStep#{step}"))


@contextmanager
def _torch_trace(prepared: profile, path: Path) -> Iterator[None]:
    """While active, traces this rank. Then writes the trace, or warns if it cannot be written."""
    of_other_threads: list[RangeOfThread] = []
    prepared.start_trace()
    with unfollowed_threads_through(partial(noted_range, of_other_threads)):
        yield
    prepared.stop_trace()
    try:
        _write(prepared, of_other_threads, path)
    except OSError as error:  # such as a full disk, which must not end training
        logger.warning(f"the trace {path} was not written: {error}")
        return
    if dist.get_rank() == 0:
        tqdm.write(f"traces of each rank are in {path.parent}")


def _write(stopped: profile, ranges: Sequence[RangeOfThread], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = path.with_suffix("")
    stopped.export_chrome_trace(str(plain))
    with plain.open() as lines, gzip.open(path, "wt", compresslevel=5) as compressed:
        compressed.writelines(_with_ranges(lines, ranges))
    plain.unlink()


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
