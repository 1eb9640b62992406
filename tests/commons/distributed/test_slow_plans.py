"""Rank 0 names what takes long: a start that waits, and plans that take longer than a step."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from collections.abc import Iterator

import pytest
import torch

from commons.distributed import PARTITIONERS, BatchShuffler, Extension
from commons.partition import longest_processing_time
from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.commons.distributed.internals import show_if_slow

STEPS = 80  # 10 do not count, and then each 32 are looked at together
ROWS = 4
NAMED = "every step waits for its plan"


class SlowShuffler(BatchShuffler):
    """Sleeps in some calls."""

    def __init__(self, seconds: float, every: int = 1, **settings) -> None:
        super().__init__(**settings)
        self._seconds, self._every, self._calls = seconds, every, 0

    def get_workloads(self, batch):
        self._calls += 1
        time.sleep(self._seconds if self._calls % self._every == 0 else 0.0)
        return torch.ones(ROWS, dtype=torch.int64)


def _batches() -> Iterator[dict[str, torch.Tensor]]:
    return ({"ids": torch.full((ROWS, 1), float(number))} for number in range(STEPS))


def _warnings_of_loop(shuffler: BatchShuffler, step_seconds: float) -> list[str]:
    with warnings_of("commons") as messages:
        for _ in shuffler.plan_ahead(_batches()):
            time.sleep(step_seconds)
    return [message for message in messages if NAMED in message]


def test_slow_workloads_are_named_once_with_both_times():
    [warning] = _warnings_of_loop(SlowShuffler(0.02), 0.001)
    planning, step = (float(words.split()[-1]) for words in warning.split(" ms")[:2])
    assert planning >= 20 > step >= 1
    assert warning.endswith("; make SlowShuffler.get_workloads faster")


@pytest.mark.parametrize(("seconds", "every"), [(0.0, 1), (0.1, 10)])
def test_a_plan_that_a_step_hides_is_not_named_nor_one_that_is_slow_now_and_then(seconds, every):
    assert not _warnings_of_loop(SlowShuffler(seconds, every), 0.01)


def _slow_partitioner(workloads, num_partitions, equal_size=True):
    time.sleep(0.02)
    return longest_processing_time(workloads, num_partitions, equal_size)


def _warnings_of_slow_partitioner() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PARTITIONERS, "slow", _slow_partitioner)
        return _warnings_of_loop(SlowShuffler(0.0, partitioner="slow"), 0.0)


def test_rank_0_names_the_partitioner(pools):
    [warning], others = pools(2).run(_warnings_of_slow_partitioner)
    assert not others
    assert 'set partitioner="longest_processing_time" (TrainerArgs.balance_partitioner)' in warning


class Searching(Extension):
    """Takes long to place rows."""

    name, order = "searching", 0
    faster_without = "leave Searching out"


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, "raise tolerance (TrainerArgs.balance_tolerance)"),
        ({"partitioner": "longest_processing_time"}, "process_group="),
        ({"partitioner": "longest_processing_time", "extensions": [Searching()]}, "leave Searching out"),
    ],
)
def test_the_setting_that_makes_planning_faster(settings, remedy):
    assert remedy in SlowShuffler(0.0, **settings).faster_planning()[1]


def _shown_of_start(seconds: float) -> str:
    with (
        contextlib.redirect_stderr(io.StringIO()) as shown,
        show_if_slow("connecting 9 ranks", after_s=0.05),
    ):
        time.sleep(seconds)
    return shown.getvalue()


def test_a_log_file_has_two_lines_of_a_slow_start_on_rank_0(pools):
    assert pools(2).run(_shown_of_start, 0.3) == ["connecting 9 ranks …\nconnecting 9 ranks: 0 s\n", ""]
    assert _shown_of_start(0.0) == ""


def test_a_terminal_counts_the_seconds_of_a_slow_start():
    of_terminal, terminal = os.openpty()
    with (
        os.fdopen(terminal, "w") as stderr,
        contextlib.redirect_stderr(stderr),
        show_if_slow("connecting 9 ranks", after_s=0.05),
    ):
        time.sleep(1.2)
    shown = ""
    with contextlib.suppress(OSError):  # at its end
        while True:
            shown += os.read(of_terminal, 1000).decode()
    os.close(of_terminal)
    assert re.fullmatch(r"(\rconnecting 9 ranks: \d s){2,}\r\n", shown)
