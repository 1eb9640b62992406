"""Decorators that compile functions with numba."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba import njit

from .. import NAME

# Numba's wrappers for C callers and for Python callers take time to compile, so unused ones are left out.
_WITHOUT_C: dict[str, Any] = {"nogil": True, "no_cfunc_wrapper": True}
_INNER: dict[str, Any] = {**_WITHOUT_C, "no_cpython_wrapper": True}
_warned = False


def compiled(function: Callable[..., Any]) -> Any:
    """Compiles a function with numba at its first call. The compiled function runs without the GIL.

    Later processes load it from numba's cache, if there is a folder that numba can write. Numba notices a
    change to the file of a cached function, but not to other files whose functions it calls. We add
    `kernels.py`, so a compiled function must call only functions of its own file, and of `kernels.py`.
    """
    # A checkout can be imported under two names. Cached types refer to one, so each name has its own cache.
    function.__qualname__ = f"{NAME}.{function.__qualname__}"
    try:
        dispatcher: Any = njit(cache=True, **_WITHOUT_C)(function)
    except RuntimeError:  # numba finds no folder that it can write
        _warn_once("it can be written neither next to the sources nor in the home directory")
        return njit(**_WITHOUT_C)(function)
    if dispatcher is function:  # NUMBA_DISABLE_JIT, for a debugger
        return function
    # `_cache` is private, so pyproject.toml pins numba to versions that were tried, and a test covers this.
    cache = dispatcher._cache
    kernels = os.stat(Path(__file__).with_name("kernels.py"))
    cache._cache_file._source_stamp = cache._cache_file._source_stamp, kernels.st_mtime, kernels.st_size
    cache.load_overload = _or_compile(cache.load_overload, cache)
    cache.save_overload = _or_compile(cache.save_overload, cache)
    return dispatcher


def inner(function: Callable[..., Any]) -> Any:
    """Compiles a function as part of the compiled functions that call it. Python cannot call it."""
    return njit(**_INNER)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compiles a function into each compiled function that calls it, which saves calls in hot loops."""
    return njit(**_INNER, forceinline=True)(function)


def _or_compile(access: Callable[..., Any], cache: Any) -> Callable[..., Any]:
    """Wraps a method of `cache` to return None if it fails, so that numba compiles the function instead."""

    def access_or_compile(*arguments: Any) -> Any:
        try:
            return access(*arguments)
        except Exception as error:  # damaged files raise almost any error
            _warn_once(f"{cache.cache_path}: {type(error).__name__}: {error}")
            with suppress(OSError):
                cache.flush()  # a damaged index would also prevent later writes
            return None

    return access_or_compile


def _warn_once(reason: str) -> None:
    """Logs at most one warning, and only in one process of each machine, local rank 0."""
    global _warned
    if not _warned and os.environ.get("LOCAL_RANK", "0") == "0":
        logging.getLogger(__name__).warning(
            f"numba's cache cannot be used ({reason}): functions compile in memory, which takes about 20 "
            "seconds. If this happens at every start, set NUMBA_CACHE_DIR to a folder that can be written"
        )
    _warned = True
