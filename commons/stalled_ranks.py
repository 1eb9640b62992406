"""Groups the stacks of stalled ranks by text, so that the odd one stands out.

`python -m commons.stalled_ranks LOG_DIR` reads the files that `HangWatch` wrote to `LOG_DIR/stacks`. It needs
no torch, so it can run beside a job that hangs, on any machine that sees the folder.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from .local_paths import local_path

STACKS = "stacks"  # the folder in a log_dir

_FILE = re.compile(r"rank(\d+)\.txt")
_REPORT = re.compile(
    r"^(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) rank \d+ has been in (?P<step>.+) for more than "
    r"(?P<limit>[\d.e+-]+) s, now in (?P<place>.+)$",
    re.MULTILINE,
)
_GOES_ON = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d rank \d+ goes on: ", re.MULTILINE)
_DUMP = re.compile(r"^Timeout \(", re.MULTILINE)
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-fA-F]+ .*\(most recent call first\):$")
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.+)$')
# Frames that tell less than their callers: the standard library's, and the decorator of all collectives.
_SAYS_LITTLE = re.compile(r"/lib(?:64)?/python3\.\d+/(?!(?:site|dist)-packages/)|^<frozen |/c10d_logger\.py$")
_MOST_BYTES = 4 << 20  # more than one dump: faulthandler stops at 100 threads of 100 frames
_CLOCK_SKEW = 60.0  # seconds between nodes
_MOST_PLACES = 6  # in a summary
_MOST_RANGES = 8  # in a list of ranks
_MOST_PROBLEMS = 5


@dataclass(frozen=True)
class Stall:
    """The state of a rank when it last reported a stall.

    Attributes:
        rank: rank in the job.
        step: step in which the rank stalled, such as "step 812"; "an unknown step" if only stacks exist.
        time: time of the report, in seconds since the epoch.
        limit: seconds in one step after which the rank reported; 0 if unknown.
        place: innermost function of the training thread that tells what the thread was doing.
        stack: lines of the training thread, innermost first; empty if the file ends before them.
        planning: lines of the planning thread; empty without such a thread.
    """

    rank: int
    step: str
    time: float
    limit: float
    place: str
    stack: tuple[str, ...]
    planning: tuple[str, ...]


def place_text(name: str, path: str, line: int | str) -> str:
    """Returns a place in the form "all_reduce (torch/distributed/distributed_c10d.py:3021)"."""
    return f"{name} ({'/'.join(Path(path).parts[-3:]).replace('//', '/')}:{line})"


def read_stalls(log_dir: Path) -> tuple[list[Stall], list[str]]:
    """Returns each rank's last stall, ordered by rank, and notes on files without one.

    An empty file belongs to a rank that has not stalled. A file may end anywhere: its complete lines count.
    """
    stalls, problems = [], []
    for path in sorted((log_dir / STACKS).glob("*")):
        match = _FILE.fullmatch(path.name)
        try:
            text, written = (_end_of(path), path.stat().st_mtime) if match else ("", 0.0)
        except OSError as error:
            problems.append(f"{path.name}: {error.strerror}")
            continue
        if match and (stall := _stall_of(int(match[1]), text, written)):
            stalls.append(stall)
        elif text or not match:
            goes_on = _GOES_ON.search(text)
            why = "the rank has gone on since" if goes_on else "no stacks that a stalled rank wrote"
            problems.append(f"{path.name}: {why}")
    return sorted(stalls, key=lambda stall: stall.rank), problems


def summary(stalls: Sequence[Stall], num_ranks: int) -> str:
    """Returns one line on where ranks stalled, the largest group first. Needs at least one stall.

    `num_ranks` is the number of ranks of the job, 0 if unknown.
    """
    last, before = _last_and_before(stalls)
    parts = [
        f"{ranks_text(_ranks(group))} in {group[0].place} of {group[0].step}"
        for group in _groups(last, lambda stall: (stall.step, stall.place))
    ]
    if len(parts) > _MOST_PLACES:
        parts[_MOST_PLACES - 1 :] = [f"others in {len(parts) - _MOST_PLACES + 1} more places"]
    silent = sorted(set(range(num_ranks)) - set(_ranks(stalls)))
    parts += [f"no stacks of {ranks_text(silent)}"] if silent else []
    parts += [f"only older stacks of {ranks_text(_ranks(before))}"] if before else []
    return "; ".join(parts)


def report(stalls: Sequence[Stall], num_ranks: int) -> str:
    """Returns the summary, then each distinct stack, the rarest first. Arguments are those of `summary`."""
    last, before = _last_and_before(stalls)
    shown = [
        _stacks_text(group)
        for part in (last, before)
        for group in reversed(_groups(part, lambda stall: (stall.step, stall.stack or stall.place)))
    ]
    return "\n\n".join([summary(stalls, num_ranks), *shown])


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ascending ranks as a text such as "rank 5" or "1,023 ranks (0-4, 6-1023)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    texts = ["-".join(map(str, ends)) for ends in ranges]
    more = ["…"] if len(texts) > _MOST_RANGES else []
    return f"{len(ranks):,} ranks ({', '.join(texts[:_MOST_RANGES] + more)})"


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - _MOST_BYTES, 0))
        return file.read().decode(errors="replace")


def _stall_of(rank: int, text: str, written: float) -> Stall | None:
    """Returns the last stall in a rank's file; None if there is none, or if the rank went on after it."""
    dumps = list(_DUMP.finditer(text))
    last = text[dumps[-1].start() :] if dumps else text
    said = _REPORT.search(last)
    threads = _threads(last)
    if _GOES_ON.search(last) or (said is None and not any(threads)):
        return None
    # Faulthandler lists at most 100 threads, from the newest to the oldest, which is the training thread.
    stack = () if not threads or _is_started(threads[-1]) else threads[-1]
    planning = [thread for thread in threads if _is_started(thread) and '/plan_ahead.py"' in "".join(thread)]
    time, limit = written, 0.0
    if said is not None:
        with suppress(ValueError, OverflowError):  # in a damaged file; its modification time will do
            time, limit = datetime.fromisoformat(said["time"]).timestamp(), float(said["limit"])
    return Stall(
        rank,
        "an unknown step" if said is None else said["step"],
        time,
        limit,
        _place_of(stack, "an unknown place" if said is None else said["place"]),
        stack,
        planning[0] if planning else (),
    )


def _threads(dump: str) -> list[tuple[str, ...]]:
    """Returns the lines of each thread's stack, innermost first."""
    threads: list[list[str]] = []
    for line in dump[: dump.rfind("\n") + 1].splitlines():  # the last line may be incomplete
        if _THREAD.match(line):
            threads.append([])
        elif threads and line.startswith("  "):
            threads[-1].append(line)
    return [tuple(thread) for thread in threads]


def _is_started(thread: tuple[str, ...]) -> bool:
    """Returns whether a stack belongs to a thread that Python started, rather than to the main thread."""
    return bool(thread) and thread[-1].endswith(" in _bootstrap")


def _place_of(stack: tuple[str, ...], said: str) -> str:
    """Returns the innermost frame that tells what a thread does, or else the place that the rank reported."""
    frames = [frame for frame in map(_FRAME.match, stack) if frame is not None]
    telling = [frame for frame in frames if not _SAYS_LITTLE.search(frame["path"])]
    for frame in (telling or frames)[:1]:
        place = place_text(frame["name"], frame["path"], frame["line"])
        # The rank also reports the class, as in "DataLoader.__next__".
        return said if said.endswith(place[place.index(" (") :]) else place
    return said


def _last_and_before(stalls: Sequence[Stall]) -> tuple[list[Stall], list[Stall]]:
    """Divides stalls into those of the last hang, and those of ranks that last reported an earlier hang."""
    since = max(stall.time for stall in stalls) - max(stall.limit for stall in stalls) - _CLOCK_SKEW
    before = [stall for stall in stalls if stall.time < since]
    return [stall for stall in stalls if stall.time >= since], before


def _groups(stalls: Iterable[Stall], key: Callable[[Stall], Hashable]) -> list[list[Stall]]:
    """Returns groups of stalls with equal keys, the largest group first, then by rank."""
    groups: dict[Hashable, list[Stall]] = {}
    for stall in stalls:
        groups.setdefault(key(stall), []).append(stall)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))


def _stacks_text(group: list[Stall]) -> str:
    """Returns a text of a group's ranks, report times, common stack, and stacks of planning threads."""
    times = sorted({datetime.fromtimestamp(stall.time).isoformat(" ", "seconds") for stall in group})
    lines = [f"{ranks_text(_ranks(group))} in {group[0].step}, {' to '.join(times[:1] + times[1:][-1:])}"]
    lines += group[0].stack or (f"  in {group[0].place}; the file ends before its stack",)
    for planners in _groups(filter(lambda stall: stall.planning, group), lambda stall: stall.planning):
        lines += [f"  planning thread of {ranks_text(_ranks(planners))}"]
        lines += [f"  {line}" for line in planners[0].planning]
    return "\n".join(lines)


def _ranks(stalls: Iterable[Stall]) -> list[int]:
    return [stall.rank for stall in stalls]


def _num_ranks(log_dir: Path) -> int:
    """Returns the number of ranks of the newest run in a `train.jsonl`, or 0 if it is unknown."""
    num_ranks = 0
    # Without this number, silent ranks are not named. The last line of a running job may be incomplete.
    with suppress(OSError, ValueError, TypeError, KeyError), (log_dir / "train.jsonl").open("rb") as lines:
        for line in lines:
            if line.startswith(b'{"kind": "start"'):
                num_ranks = int(json.loads(line)["ranks"])
    return num_ranks


def main(argv: Sequence[str] | None = None) -> None:
    """Prints where the ranks of a job stalled."""
    parser = argparse.ArgumentParser(
        prog="stalled_ranks", description="Groups the stacks that stalled ranks wrote to a log_dir."
    )
    parser.add_argument("log_dir", type=local_path, help="TrainerArgs.log_dir of the job")
    log_dir = parser.parse_args(argv).log_dir
    if not log_dir.is_dir():
        parser.error(f"{log_dir} is not a folder; expected TrainerArgs.log_dir of a job")
    stalls, problems = read_stalls(log_dir)
    for problem in problems[:_MOST_PROBLEMS]:
        print(f"not read: {problem}", file=sys.stderr)
    if len(problems) > _MOST_PROBLEMS:
        print(f"not read: {len(problems) - _MOST_PROBLEMS:,} more files", file=sys.stderr)
    if stalls:
        print(report(stalls, _num_ranks(log_dir)))
    else:
        print(f"no rank has written stacks to {log_dir / STACKS}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly if a reader such as `head` closes the pipe
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # paths may hold any bytes
    main()
