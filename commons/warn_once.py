"""Warnings that a process logs once, however often their cause occurs."""

from __future__ import annotations

import functools
import logging


@functools.cache
def warn_once(logger: logging.Logger, text: str) -> None:
    """Logs a warning, unless this process has logged it before."""
    logger.warning(text)
