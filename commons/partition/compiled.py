"""The decorators of compiled functions."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba import njit

from .. import NAME

# Without numba's wrappers for callers in C, and in Python: to compile them takes time.
_WITHOUT_C: dict[str, Any] = {"nogil": True, "no_cfunc_wrapper": True}
_INNER: dict[str, Any] = {**_WITHOUT_C, "no_cpython_wrapper": True}
_warned = False


def compiled(function: Callable[..., Any]) -> Any:
    """Compiles a function with numba at its first call; it runs without the GIL.

    Later processes find the result in numba's cache, next to the sources or in `NUMBA_CACHE_DIR`. Where
    neither can be written, every process compiles anew. Damaged files are compiled and written again. Numba
    notices a change in the file of a cached function, but not in those of functions that it calls: what it
    calls is in the same file.
    """
    # In a checkout, the same files may be imported by two names, and cached types refer to theirs.
    function.__qualname__ = f"{NAME}.{function.__qualname__}"
    try:
        dispatcher: Any = njit(cache=True, **_WITHOUT_C)(function)
    except RuntimeError:  # numba finds no folder for its cache
        _warn_once("it can be written neither next to the sources nor in the home directory")
        return njit(**_WITHOUT_C)(function)
    if dispatcher is function:  # NUMBA_DISABLE_JIT, for a debugger
        return function
    # The attribute is private: pyproject.toml pins the numba versions that were tried; a test covers this.
    cache = dispatcher._cache
    cache.load_overload = _or_compile(cache.load_overload, cache)
    cache.save_overload = _or_compile(cache.save_overload, cache)
    return dispatcher


def inner(function: Callable[..., Any]) -> Any:
    """Compiles a function that only compiled ones call, as a part of these; Python cannot call it."""
    return njit(**_INNER)(function)


def _or_compile(access: Callable[..., Any], cache: Any) -> Callable[..., Any]:
    """Returns a cache's method that does nothing where the cache fails, so that numba compiles."""

    def access_or_compile(*arguments: Any) -> Any:
        try:
            return access(*arguments)
        except Exception as error:  # damaged files raise nearly anything
            _warn_once(f"{cache.cache_path}: {type(error).__name__}: {error}")
            with suppress(OSError):
                cache.flush()  # else a damaged index could not be written again
            return None

    return access_or_compile


def _warn_once(reason: str) -> None:
    """Warns in one process of each machine."""
    global _warned
    if not _warned and os.environ.get("LOCAL_RANK", "0") == "0":
        logging.getLogger(__name__).warning(
            f"numba's cache cannot be used ({reason}): functions are compiled in memory, for about 20 "
            "seconds. If that comes at every start, set NUMBA_CACHE_DIR to a folder that can be written"
        )
    _warned = True
