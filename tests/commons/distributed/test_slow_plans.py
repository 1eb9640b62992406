"""Rank 0 names what takes long: a start that waits, and plans that take longer than a step."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from typing import TextIO

import torch

from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.commons.distributed.internals import show_if_slow
from tests.commons.distributed.shufflers import DictShuffler

STEPS = 44  # 10 do not count, and the next 32 are looked at together


class SlowShuffler(DictShuffler):
    """Takes these seconds to count a batch."""

    seconds = 0.0

    def get_workloads(self, batch):
        time.sleep(self.seconds)
        return super().get_workloads(batch)


def _warnings_of_loop(plan_seconds: float, step_seconds: float) -> list[str]:
    shuffler = SlowShuffler()
    shuffler.seconds = plan_seconds
    with warnings_of("commons") as messages:
        for _ in shuffler.plan_ahead({"workload": torch.ones(4)} for _ in range(STEPS)):
            time.sleep(step_seconds)
    return [message for message in messages if "every step waits for its plan" in message]


def test_rank_0_names_once_what_makes_planning_slower_than_a_step(pools):
    [warning], others = pools(2).run(_warnings_of_loop, 0.02, 0.001)
    planning, step = (float(words.split()[-1]) for words in warning.split(" ms")[:2])
    assert planning >= 20 > step >= 1 and not others
    assert warning.endswith("; make SlowShuffler.get_workloads faster")
    assert not _warnings_of_loop(0.0, 0.01)
    assert "raise tolerance (TrainerArgs.balance_tolerance)" in SlowShuffler().faster_planning()[1]


def _start(seconds: float, stderr: TextIO) -> None:
    with contextlib.redirect_stderr(stderr), show_if_slow("connecting 9 ranks", after_s=0.05):
        time.sleep(seconds)


def _shown_in_a_file(seconds: float) -> str:
    shown = io.StringIO()
    _start(seconds, shown)
    return shown.getvalue()


def test_a_log_file_has_two_lines_of_a_slow_start_on_rank_0(pools):
    assert pools(2).run(_shown_in_a_file, 0.3) == ["connecting 9 ranks …\nconnecting 9 ranks: 0 s\n", ""]
    assert _shown_in_a_file(0.0) == ""


def test_a_terminal_counts_the_seconds_of_a_slow_start():
    of_terminal, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stderr:
        _start(1.2, stderr)
    shown = ""
    with contextlib.suppress(OSError):  # at its end
        while True:
            shown += os.read(of_terminal, 1000).decode()
    os.close(of_terminal)
    assert re.fullmatch(r"(\rconnecting 9 ranks: \d s){2,}\r\n", shown)
