"""Versions of torch and TorchRec that pass the core's tests, which `make versions` runs."""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TriedSet:
    """Versions that belong together: torch 2.(N + 5), fbgemm 1.N and TorchRec 1.N."""

    torch: str
    torchrec: str
    fbgemm: str
    pythons: tuple[str, ...] = ("3.11",)


# pyproject.toml has the ranges of these versions, and docs/installing.md has the results.
TRIED = (
    TriedSet("2.9.1", "1.4.0", "1.4.2"),
    TriedSet("2.10.0", "1.5.1", "1.5.0"),
    TriedSet("2.11.0", "1.6.1", "1.6.0"),
    TriedSet("2.12.1", "1.7.0", "1.7.0"),
    TriedSet("2.13.0", "1.8.0", "1.8.0", ("3.11", "3.12", "3.13")),
    TriedSet("2.14.1", "1.9.2", "1.9.0"),
)


def note_on_untried(torch_version: str, torchrec_version: str) -> str | None:
    """Returns a warning if this set of versions is untested; None if only patch versions differ."""
    tried = {_minor(each.torch): _minor(each.torchrec) for each in TRIED}
    if tried.get(_minor(torch_version)) == _minor(torchrec_version):
        return None
    sets = ", ".join(f"{known_torch} with {known_torchrec}" for known_torch, known_torchrec in tried.items())
    return (
        f"torch {torch_version} with torchrec {torchrec_version} is untested; tested are torch and torchrec "
        f"{sets}. Compare the losses of a few steps with those without balancing"
    )


@functools.cache
def warn_of_untried() -> None:
    """Warns once, on rank 0, if this job runs untested versions."""
    torchrec = sys.modules.get("torchrec")
    if torchrec is None:  # a controller may run without it
        return
    note = note_on_untried(torch.__version__, getattr(torchrec, "__version__", "of unknown version"))
    if note is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(note)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
