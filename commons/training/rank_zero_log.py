"""Warnings that a user sees once, not once per rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch.distributed as dist

logger = logging.getLogger(__name__)
_given: set[str] = set()


def warn_once(messages: Iterable[str]) -> None:
    """Logs each message that has not been logged before, on rank 0."""
    for message in messages:
        if message not in _given and dist.get_rank() == 0:
            logger.warning(message)
        _given.add(message)
