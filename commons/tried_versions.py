"""The versions of torch and TorchRec that the core's tests have passed with: `make versions` runs them."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torchrec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TriedSet:
    """Versions that belong together: fbgemm 1.N is built for torch 2.(N + 5), TorchRec goes with fbgemm 1.N.

    Attributes:
        torch, torchrec, fbgemm: versions, as in "2.13.0".
        pythons: as in "3.11".
    """

    torch: str
    torchrec: str
    fbgemm: str
    pythons: tuple[str, ...] = ("3.11",)


# pyproject.toml has their ranges, and docs/installing.md the results.
TRIED = (
    TriedSet("2.9.1", "1.4.0", "1.4.2"),
    TriedSet("2.10.0", "1.5.1", "1.5.0"),
    TriedSet("2.11.0", "1.6.1", "1.6.0"),
    TriedSet("2.12.1", "1.7.0", "1.7.0"),
    TriedSet("2.13.0", "1.8.0", "1.8.0", ("3.11", "3.12", "3.13")),
    TriedSet("2.14.1", "1.9.2", "1.9.0"),
)


def note_on_untried(torch_version: str, torchrec_version: str) -> str | None:
    """One line if nobody has tried these versions together; None for a set that differs in its patches."""
    tried = {_minor(each.torch): _minor(each.torchrec) for each in TRIED}
    if tried.get(_minor(torch_version)) == _minor(torchrec_version):
        return None
    sets = ", ".join(f"{of_torch} with {of_torchrec}" for of_torch, of_torchrec in tried.items())
    return (
        f"nobody has tried torch {torch_version} with torchrec {torchrec_version} here; tried are torch and "
        f"torchrec {sets}. Compare the losses of a few steps with those without balancing"
    )


@functools.cache
def warn_of_untried() -> None:
    """Warns once, on rank 0, where this job has versions that nobody has tried."""
    note = note_on_untried(torch.__version__, getattr(torchrec, "__version__", "of no known version"))
    if note is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(note)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
