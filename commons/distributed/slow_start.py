"""Shows what keeps a run from starting."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def show_if_slow(what: str, after_s: float = 2.0) -> Iterator[None]:
    """While active for longer than `after_s`, shows on rank 0 what runs, and for how long.

    A terminal counts the seconds in one line; a log file has a line at first, and one at the end.
    """
    is_done = threading.Event()

    def show() -> None:
        start = time.perf_counter()
        if is_done.wait(after_s):
            return
        counts = sys.stderr.isatty()
        line = "\r{}: {:.0f} s" if counts else "{}: {:.0f} s"
        if not counts:
            print(f"{what} …", file=sys.stderr, flush=True)
        while not is_done.wait(1.0 if counts else None):
            print(line.format(what, time.perf_counter() - start), end="", file=sys.stderr, flush=True)
        print(line.format(what, time.perf_counter() - start), file=sys.stderr, flush=True)

    torch = sys.modules.get("torch")  # whoever has ranks has imported it; the advisor has none
    if torch is not None and torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        yield
        return
    thread = threading.Thread(target=show, name="slow start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
