"""Traces of selected steps, by torch.profiler or as a capture range for Nsight Systems."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

from ..named_ranges import NotedRanges, RangeOfThread, unfollowed_threads_through
from .run_log import warn_once
from .training_args import TrainerArgs

logger = logging.getLogger(__name__)


class StepTraces:
    """Traces the steps of this rank that the arguments select, if any.

    torch.profiler writes `<log_dir>/traces/rank<rank>.json.gz` after the last of them, or when training ends
    before. Under Nsight Systems, which cannot share a GPU with torch.profiler, this starts and stops its
    capture instead, with NVTX ranges.

    Args:
        args: `profile`, `profile_step_start`, `profile_step_end` and `log_dir`.
        first_step: steps done before this process.
        num_steps: steps of the run.
        device: device that the steps run on.
    """

    def __init__(self, args: TrainerArgs, first_step: int, num_steps: int, device: torch.device) -> None:
        self._first, self._end = args.profile_step_start, args.profile_step_end
        self._trace: _TorchTrace | _NsightCapture | None = None
        self._prepared = self._started = False
        self._step_range = ExitStack()
        if not args.profile:
            return
        if self._end <= first_step + 1 or self._first > num_steps:
            warn_once(
                f"TrainerArgs.profile writes no trace: it selects steps {self._first} to {self._end - 1}, "
                f"and this run does {first_step + 1} to {num_steps}"
            )
        elif device.type == "cuda" and "NSYS_PROFILING_SESSION_ID" in os.environ:
            self._trace = _NsightCapture()
        else:
            self._trace = _TorchTrace(Path(args.log_dir) / "traces", device)

    def __enter__(self) -> StepTraces:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def before_step(self, step: int) -> None:
        """Starts, continues or stops the trace; call before each step, which counts from 1."""
        if self._trace is None:
            return
        self._step_range.close()
        if step >= self._end:
            self._stop()
            return
        if step >= self._first - 1 and not self._prepared:  # a step ahead, because it disturbs the next one
            self._trace.prepare()
            self._prepared = True
        if step >= self._first:
            if not self._started:
                self._trace.start()
                self._started = True
            # Tools that read such traces find steps by this name.
            self._step_range.enter_context(record_function(f"ProfilerStep#{step}"))

    def _stop(self) -> None:
        self._step_range.close()
        if self._trace is not None and self._started:
            self._trace.stop()
        self._trace = None


class _TorchTrace:
    """torch.profiler's trace of this rank.

    Args:
        folder: folder to write it to.
        device: device to trace, in addition to the host.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._path = folder / f"rank{dist.get_rank()}.json.gz"
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # The profiler reads this when first used; otherwise it prints a line at its start and its end.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = profile(activities=activities)
        self._of_other_threads = NotedRanges()
        self._following = ExitStack()

    def prepare(self) -> None:
        """Loads the profiler."""
        self._profile.prepare_trace()

    def start(self) -> None:
        """Starts the trace."""
        self._profile.start_trace()
        self._following.enter_context(unfollowed_threads_through(self._of_other_threads.range))

    def stop(self) -> None:
        """Stops the trace and writes it; warns if it cannot be written."""
        self._following.close()
        self._profile.stop_trace()
        try:
            self._write()
        except OSError as error:  # such as a full disk: training is worth more
            logger.warning(f"the trace {self._path} was not written: {error}")
            return
        if dist.get_rank() == 0:
            tqdm.write(f"traces of each rank are in {self._path.parent}")

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        plain = self._path.with_suffix("")
        self._profile.export_chrome_trace(str(plain))
        with plain.open() as lines, gzip.open(self._path, "wt", compresslevel=5) as compressed:
            compressed.writelines(_with_ranges(lines, self._of_other_threads.ended))
        plain.unlink()


def _with_ranges(lines: Iterator[str], ranges: Sequence[RangeOfThread]) -> Iterator[str]:
    """Adds the ranges to a trace line by line: parsed, it may be far larger than memory."""
    base_ns = 0
    for line in lines:
        yield line
        key, _, value = line.strip().rstrip(",").partition(": ")
        if key == '"baseTimeNanoseconds"':
            base_ns = int(value)
        elif key == '"traceEvents"':
            yield from (json.dumps(event) + ",\n" for event in _events(ranges, base_ns))


def _events(ranges: Sequence[RangeOfThread], base_ns: int) -> Iterator[dict[str, Any]]:
    """The ranges and their threads in the trace's format, with times in microseconds from `base_ns`."""
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


class _NsightCapture:
    """The range that `nsys profile --capture-range=cudaProfilerApi` captures, with all stages in NVTX."""

    def __init__(self) -> None:
        self._following = ExitStack()

    def prepare(self) -> None:
        """Does nothing: Nsight Systems was started before the process."""

    def start(self) -> None:
        """Starts the capture."""
        torch.cuda.profiler.start()
        self._following.enter_context(torch.autograd.profiler.emit_nvtx())
        self._following.enter_context(unfollowed_threads_through(torch.cuda.nvtx.range))

    def stop(self) -> None:
        """Stops the capture."""
        self._following.close()
        torch.cuda.profiler.stop()
