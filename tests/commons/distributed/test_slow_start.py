"""Rank 0 names a start that waits."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from typing import TextIO

from tests.commons.distributed.internals import show_if_slow


def _start(seconds: float, stderr: TextIO) -> None:
    with contextlib.redirect_stderr(stderr), show_if_slow("connecting 9 ranks", after_s=0.05):
        time.sleep(seconds)


def _shown_in_a_file(seconds: float) -> str:
    shown = io.StringIO()
    _start(seconds, shown)
    return shown.getvalue()


def test_a_log_file_has_two_lines_of_a_slow_start_on_rank_0(pools):
    assert pools(2).run(_shown_in_a_file, 0.3) == ["connecting 9 ranks ...\nconnecting 9 ranks: 0 s\n", ""]
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
