"""A start that takes long says what it does, on rank 0."""

from __future__ import annotations

import contextlib
import io
import time

from commons.distributed.slow_start import shown_if_slow


def _shown(seconds: float) -> str:
    with (
        contextlib.redirect_stderr(io.StringIO()) as shown,
        shown_if_slow("connecting 9 ranks", after_s=0.05),
    ):
        time.sleep(seconds)
    return shown.getvalue()


def test_only_rank_0_shows_what_takes_long(pools):
    first, second = pools(2).run(_shown, 0.3)
    assert "connecting 9 ranks: 0 s\n" in first and second == ""


def test_a_quick_start_shows_nothing():
    assert _shown(0.0) == ""
