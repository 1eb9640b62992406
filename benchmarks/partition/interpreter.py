"""Whether another thread keeps its speed while this one partitions: who holds the interpreter's lock."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.harness import Record, cases, measured, milliseconds, spread
from benchmarks.markdown import table
from benchmarks.partition.lengths import lognormal
from benchmarks.partition.placements import PLACEMENTS, draw_batches

RANKS, HIDDEN_SIZE = (64, 1024), 1024
NAMES = ("refined", "rebalance")
ROUNDS, SECONDS = 7, 1.0


class _Counter(threading.Thread):
    """Counts in pure Python until told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stopped = False
        self.per_second = 0.0

    def run(self) -> None:
        count, start = 0, time.perf_counter()
        while not self.is_stopped:
            count += 1
        self.per_second = count / (time.perf_counter() - start)


def measure_interpreter() -> list[Record]:
    """A record for each number of ranks and placement: alone and together in turns, `SECONDS` each time."""
    return measured(cases(ranks=RANKS, placement=NAMES), _measure, "threads")


def _measure(ranks: int, placement: str) -> Record:
    (batch,) = draw_batches(lognormal, HIDDEN_SIZE, ranks, draws=1)
    place = partial(PLACEMENTS[placement].place, batch)
    place()  # compiles
    speeds, alone, together = [], [], []
    for _ in range(ROUNDS):
        loop_alone, _ = _counting(lambda: time.sleep(SECONDS))
        alone += _call_for(SECONDS, place)
        loop_together, calls = _counting(lambda: _call_for(SECONDS, place))
        speeds.append(loop_together / loop_alone)
        together += calls
    return {
        "rounds": ROUNDS,
        "loop_speed_relative_to_alone": spread(speeds),
        "ms_per_call_alone": round(statistics.fmean(alone), 4),
        "ms_per_call_beside_the_loop": round(statistics.fmean(together), 4),
    }


def _counting(work: Callable[[], Any]) -> tuple[float, Any]:
    """Counts per second while `work` runs, and returns the rate and the result of `work`."""
    counter = _Counter()
    counter.start()
    try:
        result = work()
    finally:
        counter.is_stopped = True
        counter.join()
    return counter.per_second, result


def _call_for(seconds: float, call: Callable[[], object]) -> list[float]:
    """Calls until so many seconds have passed: the milliseconds of each call."""
    end, times = time.perf_counter() + seconds, []
    while time.perf_counter() < end:
        times.append(milliseconds(call))
    return times


def threads_table(threads: list[Record]) -> str:
    """Returns Markdown."""
    speed = "loop_speed_relative_to_alone"
    columns = {
        "partitioner": "{placement}",
        "ranks": "{ranks}",
        "speed of the loop": f"{{{speed}[median]:.0%}} ({{{speed}[min]:.0%}} to {{{speed}[max]:.0%}})",
        "ms alone": "{ms_per_call_alone:.2f}",
        "ms beside the loop": "{ms_per_call_beside_the_loop:.2f}",
    }
    return table(threads, columns)
