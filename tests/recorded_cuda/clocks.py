"""Streams, events and memory of a GPU that is not there: what is ordered after what, by vector clocks.

Stream A writes x as its kernel 7. A kernel of stream B may read x once B's clock has A at 7, which
`B.wait_stream(A)` sees to. So each kernel gets the next number of its stream, and a stream's clock has the
newest number of every stream that its next kernel is ordered after.

Memory goes back to the stream that it was allocated on, as in torch's caching allocator, and may be handed
out at the next allocation there. By then that stream has to be ordered after all that other streams did with
it, except for streams that were recorded for it.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Clock = dict[int, int]
_ROOT = str(Path(__file__).parents[2])
_HARNESS = str(Path(__file__).parent)
_lock = threading.RLock()


def merge(clock: Clock, other: Clock) -> None:
    """Orders the owner of `clock` after all that `other` has seen."""
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number


class Stream:
    """Stands in for `torch.cuda.Stream`."""

    _ids = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0, name: str = "") -> None:
        self.id = next(self._ids)
        self.device, self.priority = torch.device("cuda", 0), priority
        self.stream_id = self.cuda_stream = self.id
        self.name = name or f"stream {self.id}"
        self.clock: Clock = {}

    def wait_stream(self, other: Stream) -> None:
        with _lock:
            merge(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        with _lock:
            merge(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        DEVICE.wait("Stream.synchronize", self.clock)


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """Takes the place after what is on the stream, or on the current one."""
        with _lock:
            self.clock = dict((stream or DEVICE.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or DEVICE.current).wait_event(self)

    def synchronize(self) -> None:
        DEVICE.wait("Event.synchronize", self.clock)

    def query(self) -> bool:
        """Returns True, and the host knows so."""
        merge(DEVICE.host, self.clock)
        return True

    def elapsed_time(self, end: Event) -> float:
        """Returns a millisecond; reading it too early is a finding."""
        for event in (self, end):
            if any(DEVICE.host.get(stream, 0) < number for stream, number in event.clock.items()):
                DEVICE.find("the time of an event is read before the host has waited for it")
        return 1.0


class Memory:
    """The record of a storage; lives as long as the storage.

    Args:
        kind: "device"; "pinned"; or "host", pageable memory that a copy from the device fills.
        stream: that it is allocated on.
    """

    def __init__(self, kind: str, stream: Stream) -> None:
        self.kind, self.stream, self.site = kind, stream, call_site()
        self.uses: dict[tuple[int, int, int, bool], int] = {}  # by stream, first and last byte, is written
        self.recorded: set[int] = set()

    def conflicts(self, start: int, end: int, writes: bool, clock: Clock) -> Iterator[tuple[int, bool]]:
        """Yields the stream of each use that `clock` is not ordered after, and whether it writes."""
        for (stream, first, last, is_written), number in self.uses.items():
            overlaps = first < end and start < last
            if overlaps and (writes or is_written) and clock.get(stream, 0) < number:
                yield stream, is_written

    def __del__(self) -> None:
        if self.kind == "device":
            with _lock:
                DEVICE.free(self)


@dataclass(frozen=True)
class Access:
    """Bytes of a storage that a kernel reads or writes."""

    memory: Memory
    start: int
    end: int
    writes: bool


@dataclass
class Device:
    """The GPU of this process, and what was found on it.

    Attributes:
        findings: faults, each once.
        waits: of the host, by what waited and where.
        kernels: by stream and name.
        launches: collectives on communicators of the device, in order: group and operation.
        host: what the host knows to have run.
    """

    findings: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    kernels: Counter[tuple[str, str]] = field(default_factory=Counter)
    launches: list[tuple[str, str]] = field(default_factory=list)
    host: Clock = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.default = Stream(name="default")
        self._of_thread = threading.local()
        self._freed: dict[int, list[tuple[Clock, str]]] = {}
        self._names: dict[int, str] = {}

    def clear(self) -> None:
        for found in (self.findings, self.waits, self.kernels, self.launches, self._freed):
            found.clear()

    @property
    def current(self) -> Stream:
        return getattr(self._of_thread, "stream", self.default)

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """While active, a stream is the current one of this thread."""
        before = self.current
        self._of_thread.stream = stream or before
        try:
            yield
        finally:
            self._of_thread.stream = before

    def find(self, fault: str) -> None:
        self.findings[f"{call_site()}: {fault}"] += 1

    def wait(self, what: str, clock: Clock | None = None) -> None:
        """Notes that the host waits; it then knows what is in `clock`.

        What a wait without one covers besides excuses nothing: TorchRec reads sizes about eight times a step,
        which would hide a third of all faults. No wait of the host orders streams, for the same reason.
        """
        with _lock:
            if clock is not None:
                merge(self.host, clock)
            self.waits[f"{call_site()} {what}"] += 1

    def kernel(self, name: str, accesses: list[Access], stream: Stream | None = None) -> None:
        """Launches a kernel, which has to be ordered after what it conflicts with."""
        stream = stream or self.current
        with _lock:
            self._names[stream.id] = stream.name
            number = stream.clock[stream.id] = stream.clock.get(stream.id, 0) + 1
            self.kernels[stream.name, name] += 1
            for access in accesses:
                memory = access.memory
                for other, wrote in memory.conflicts(access.start, access.end, access.writes, stream.clock):
                    self.find(
                        f"{name} {'writes' if access.writes else 'reads'} on {stream.name} what "
                        f"{self._names[other]} {'writes' if wrote else 'reads'} (made at {memory.site})"
                    )
                key = (stream.id, access.start, access.end, access.writes)
                memory.uses[key] = number

    def allocate(self, kind: str = "device", stream: Stream | None = None) -> Memory:
        """Returns new memory. On the device, it may be what was freed on the stream."""
        stream = stream or self.current
        with _lock:
            for uses, site in self._freed.pop(stream.id, []) if kind == "device" else ():
                for other, number in uses.items():
                    if stream.clock.get(other, 0) < number:
                        self.find(
                            f"memory of {stream.name} is handed out again while {self._names[other]} uses "
                            f"it: it was freed without record_stream (made at {site})"
                        )
            return Memory(kind, stream)

    def free(self, memory: Memory) -> None:
        """Gives memory back to the stream that it was allocated on."""
        uses: Clock = {}
        for (stream, *_), number in memory.uses.items():
            if stream != memory.stream.id and stream not in memory.recorded:
                uses[stream] = max(number, uses.get(stream, 0))
        if uses:
            self._freed.setdefault(memory.stream.id, []).append((uses, memory.site))

    def on_host(self, memory: Memory, start: int, end: int, writes: bool, name: str) -> None:
        """Checks that the host touches memory only after the copies that it knows to have run."""
        with _lock:
            for other, wrote in memory.conflicts(start, end, writes, self.host):
                does = "writes" if writes else "reads"
                self.find(
                    f"{name} {does} on the host what a copy on {self._names[other]} "
                    f"{'writes' if wrote else 'reads'} (made at {memory.site})"
                )


def call_site() -> str:
    """Returns the innermost file and function outside this harness and torch itself."""
    frame = sys._getframe(1)
    while frame is not None:
        if short := _short(frame.f_code.co_filename):
            return f"{short} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


@functools.cache
def _short(name: str) -> str:
    """Returns a file's short name; none if it is this harness's or torch's."""
    ours = name.startswith(_ROOT) and not name.startswith(_HARNESS) and "site-packages" not in name
    if not (ours or "/torchrec/" in name or "/fbgemm_gpu/" in name):
        return ""
    return name.split("site-packages/")[-1].removeprefix(_ROOT + "/")


DEVICE = Device()
