"""A start that takes long says what it does, on rank 0."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time

from commons.distributed.slow_start import show_if_slow


def _shown(seconds: float) -> str:
    with (
        contextlib.redirect_stderr(io.StringIO()) as shown,
        show_if_slow("connecting 9 ranks", after_s=0.05),
    ):
        time.sleep(seconds)
    return shown.getvalue()


def test_only_rank_0_shows_what_takes_long(pools):
    first, second = pools(2).run(_shown, 0.3)
    assert "connecting 9 ranks: 0 s\n" in first and second == ""


def test_a_log_file_has_two_lines_and_a_terminal_counts_seconds():
    assert re.fullmatch(r"connecting 9 ranks …\nconnecting 9 ranks: [12] s\n", _shown(1.5))
    of_terminal, terminal = os.openpty()
    with (
        os.fdopen(terminal, "w") as stderr,
        contextlib.redirect_stderr(stderr),
        show_if_slow("connecting 9 ranks", after_s=0.05),
    ):
        time.sleep(2.5)
    shown = ""
    with contextlib.suppress(OSError):  # at its end
        while True:
            shown += os.read(of_terminal, 1000).decode()
    os.close(of_terminal)
    assert re.fullmatch(r"(\rconnecting 9 ranks: \d s){3,}\r\n", shown)


def test_a_quick_start_shows_nothing():
    assert _shown(0.0) == ""
