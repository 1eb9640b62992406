"""Whether another thread keeps its speed while this one partitions: who holds the interpreter's lock."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from benchmarks.machine import spread
from benchmarks.partition.lengths import lognormal
from benchmarks.partition.placements import PLACEMENTS, draw_batches

RANKS, HIDDEN_SIZE = (64, 1024), 1024
NAMES = ("refined", "rebalance")


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


def measure_interpreter(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A record for each number of ranks and placement: alone and together in turns, so long each time."""
    cases = [(ranks, name) for ranks in RANKS for name in NAMES]
    return [_measure(ranks, name, rounds, seconds) for ranks, name in tqdm(cases, desc="threads")]


def _measure(ranks: int, name: str, rounds: int, seconds: float) -> dict[str, Any]:
    (batch,) = draw_batches(lognormal, HIDDEN_SIZE, ranks, draws=1)
    place = PLACEMENTS[name].place
    place(batch)  # compiles
    speeds, alone, together = [], [], []
    for _ in range(rounds):
        loop_alone, _ = _counting(lambda: time.sleep(seconds))
        alone += _call_for(seconds, lambda: place(batch))
        loop_together, calls = _counting(lambda: _call_for(seconds, lambda: place(batch)))
        speeds.append(loop_together / loop_alone)
        together += calls
    return {
        "ranks": ranks,
        "placement": name,
        "rounds": rounds,
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


def _call_for(seconds: float, call: Callable[[], Any]) -> list[float]:
    """Calls until so many seconds have passed: the milliseconds of each call."""
    end = time.perf_counter() + seconds
    milliseconds = []
    while (start := time.perf_counter()) < end:
        call()
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return milliseconds
