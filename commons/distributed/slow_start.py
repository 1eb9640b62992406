"""Progress messages for operations that delay the start of a run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def show_if_slow(what: str, after_s: float = 2.0) -> Iterator[None]:
    """If active for longer than `after_s` seconds, shows on rank 0 what is running, and for how long.

    A terminal shows one line that counts the seconds. A log file gets a first line and a last line.
    """
    is_done = threading.Event()

    def show() -> None:
        start = time.perf_counter()
        if is_done.wait(after_s):
            return
        counts = sys.stderr.isatty()
        line = "\r{}: {:.0f} s" if counts else "{}: {:.0f} s"
        if not counts:
            print(f"{what} ...", file=sys.stderr, flush=True)
        while not is_done.wait(1.0 if counts else None):
            print(line.format(what, time.perf_counter() - start), end="", file=sys.stderr, flush=True)
        print(line.format(what, time.perf_counter() - start), file=sys.stderr, flush=True)

    torch = sys.modules.get("torch")  # a process with ranks has imported it; the advisor has no ranks
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
