"""Traces of some steps: torch.profiler's, or a range for Nsight Systems to capture."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

from commons.named_ranges import NotedRanges, RangeOfThread, unfollowed_threads_through
from commons.training.rank_zero_log import warn_once
from commons.training.training_args import TrainerArgs

logger = logging.getLogger(__name__)


class _Trace(Protocol):
    """What follows the steps of this rank from `start` to `stop`, both called once, after `prepare`."""

    def prepare(self) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


class StepTraces:
    """Traces the steps of this rank that the arguments say, if they say so.

    Written when the last of them is done, or training ends before: by torch.profiler to
    `<log_dir>/traces/rank<rank>.json.gz`. Under Nsight Systems its own capture is started and stopped
    instead, with NVTX ranges: a GPU can be followed by one of the two only.

    Args:
        args: of them `profile`, `profile_step_start`, `profile_step_end` and `log_dir`.
        first_step: steps that were done before this process.
        num_steps: steps that are done at the end of it.
        device: that the steps run on.
    """

    def __init__(self, args: TrainerArgs, first_step: int, num_steps: int, device: torch.device) -> None:
        self._first, self._end = args.profile_step_start, args.profile_step_end
        self._trace: _Trace | None = None
        self._prepared = self._started = False
        self._step_range: record_function | None = None
        if not args.profile:
            return
        if self._end <= first_step + 1 or self._first > num_steps:
            warn_once(
                [
                    f"TrainerArgs.profile writes no trace: it is of steps {self._first} to {self._end - 1}, "
                    f"and this run does {first_step + 1} to {num_steps}"
                ]
            )
        elif device.type == "cuda" and "NSYS_PROFILING_SESSION_ID" in os.environ:
            self._trace = _NsightCapture()
        else:
            self._trace = _TorchTrace(Path(args.log_dir) / "traces", device)

    def __enter__(self) -> StepTraces:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def before_step(self, step: int) -> None:
        """Called before each step, which counts from 1."""
        if self._trace is None:
            return
        self._end_step()
        if step >= self._end:
            self._stop()
            return
        if step >= self._first - 1 and not self._prepared:  # a step ahead: it disturbs what comes next
            self._trace.prepare()
            self._prepared = True
        if step >= self._first:
            if not self._started:
                self._trace.start()
                self._started = True
            # The name by which tools that read such traces find steps.
            self._step_range = record_function(f"ProfilerStep#{step}")
            self._step_range.__enter__()

    def _end_step(self) -> None:
        if self._step_range is not None:
            self._step_range.__exit__(None, None, None)
            self._step_range = None

    def _stop(self) -> None:
        self._end_step()
        if self._trace is not None and self._started:
            self._trace.stop()
        self._trace = None


class _TorchTrace:
    """torch.profiler's trace of this rank.

    Args:
        folder: to write it to.
        device: whose activity is traced, beside the host's.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._path = folder / f"rank{dist.get_rank()}.json.gz"
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Read when the profiler is first used, which else prints a line at its start and one at its end.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = profile(activities=activities)
        self._of_other_threads = NotedRanges()
        self._following = ExitStack()

    def prepare(self) -> None:
        """Loads the profiler."""
        self._profile.prepare_trace()

    def start(self) -> None:
        """Begins the trace."""
        self._profile.start_trace()
        self._following.enter_context(unfollowed_threads_through(self._of_other_threads.range))

    def stop(self) -> None:
        """Ends the trace and writes it; one that cannot be written costs no more than a warning."""
        self._following.close()
        self._profile.stop_trace()
        try:
            self._write()
        except OSError as error:  # a full disk, say: what is trained is worth more
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
    """The lines of a trace, which may be far larger than memory for its objects, with the ranges added."""
    base_ns = 0
    for line in lines:
        yield line
        key, _, value = line.strip().rstrip(",").partition(": ")
        if key == '"baseTimeNanoseconds"':
            base_ns = int(value)
        elif key == '"traceEvents"':
            yield from (json.dumps(event) + ",\n" for event in _events(ranges, base_ns))


def _events(ranges: Sequence[RangeOfThread], base_ns: int) -> Iterator[dict[str, Any]]:
    """The ranges in the trace's format, whose times are microseconds from `base_ns`, and their threads."""
    process = os.getpid()
    for thread_id, thread in {of_one.thread_id: of_one.thread for of_one in ranges}.items():
        name = {"name": f"thread {thread_id} ({thread})"}
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread_id, "args": name}
        order = {"sort_index": thread_id}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread_id, "args": order}
    for of_one in ranges:
        yield {
            "ph": "X",
            "cat": "user_annotation",
            "name": of_one.name,
            "pid": process,
            "tid": of_one.thread_id,
            "ts": (of_one.start_ns - base_ns) / 1e3,
            "dur": (of_one.end_ns - of_one.start_ns) / 1e3,
        }


class _NsightCapture:
    """The range that `nsys profile --capture-range=cudaProfilerApi` captures, with all stages in NVTX."""

    def __init__(self) -> None:
        self._following = ExitStack()

    def prepare(self) -> None:
        """Nothing: Nsight Systems was started before the process."""

    def start(self) -> None:
        """Begins the capture."""
        torch.cuda.profiler.start()
        self._following.enter_context(torch.autograd.profiler.emit_nvtx())
        self._following.enter_context(unfollowed_threads_through(torch.cuda.nvtx.range))

    def stop(self) -> None:
        """Ends the capture."""
        self._following.close()
        torch.cuda.profiler.stop()
