"""The decorator of the compiled functions."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()


def compiled(function: Callable[..., Any]) -> Any:
    """Compiles a function with numba when it is first called; it runs without the GIL.

    Later processes find the result in numba's cache, next to the sources or where `NUMBA_CACHE_DIR` says.
    Where nothing can be written, every process compiles anew.
    """
    try:
        dispatcher: Any = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba finds no folder for its cache
        _warn_once()
        return njit(nogil=True)(function)
    if dispatcher is function:  # NUMBA_DISABLE_JIT, for a debugger
        return function
    # Numba notices that the file of a cached function has changed, but not that of a function it calls. The
    # attributes are private: pyproject.toml holds numba to what was tried, and a test to what is said here.
    cache_file = dispatcher._cache._cache_file
    cache_file._source_stamp = (cache_file._source_stamp, _SOURCES)
    return dispatcher


@functools.cache
def _warn_once() -> None:
    logging.getLogger(__name__).warning(
        "numba can write its cache neither next to commons.partition nor in the home directory: every "
        "process compiles anew, for half a minute; set NUMBA_CACHE_DIR to a folder that can be written"
    )
