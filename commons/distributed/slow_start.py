"""Shows what keeps a run from starting."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def shown_if_slow(what: str, after_s: float = 2.0) -> Iterator[None]:
    """While active for longer than `after_s`, shows a line on rank 0 that tells what runs, and how long."""
    is_done = threading.Event()

    def show() -> None:
        start = time.perf_counter()
        if not is_done.wait(after_s):
            while True:
                print(f"\r{what}: {time.perf_counter() - start:.0f} s", end="", file=sys.stderr, flush=True)
                if is_done.wait(1.0):
                    print(file=sys.stderr)
                    return

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
