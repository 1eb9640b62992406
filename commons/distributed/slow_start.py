"""Shows what keeps a run from starting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from tqdm import tqdm


@contextmanager
def shown_if_slow(what: str, after_s: float = 2.0) -> Iterator[None]:
    """While active for longer than `after_s`, shows a line on rank 0 that tells what runs, and how long."""
    is_done = threading.Event()

    def show() -> None:
        if not is_done.wait(after_s):
            with tqdm(desc=what, bar_format="{desc}: {elapsed}") as line:
                while not is_done.wait(1.0):
                    line.refresh()

    if dist.is_initialized() and dist.get_rank() > 0:
        yield
        return
    thread = threading.Thread(target=show, name="slow start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
