"""The decorator of compiled functions."""

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
    """Compiles a function with numba at its first call; it runs without the GIL.

    Later processes find the result in numba's cache, next to the sources or in `NUMBA_CACHE_DIR`. Where
    neither can be written, every process compiles anew.
    """
    try:
        dispatcher: Any = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba finds no folder for its cache
        _warn_once()
        return njit(nogil=True)(function)
    if dispatcher is function:  # NUMBA_DISABLE_JIT, for a debugger
        return function
    # Numba notices a change in the file of a cached function, but not in those of the functions it calls. The
    # attributes are private: pyproject.toml pins the numba versions that were tried, and a test covers this.
    cache_file = dispatcher._cache._cache_file
    cache_file._source_stamp = (cache_file._source_stamp, _SOURCES)
    return dispatcher


@functools.cache
def _warn_once() -> None:
    logging.getLogger(__name__).warning(
        "numba can write its cache neither next to commons.partition nor in the home directory: every "
        "process compiles anew, for about a minute; set NUMBA_CACHE_DIR to a folder that can be written"
    )
