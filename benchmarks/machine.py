"""Describes the machine of a measurement, and the spread of its values."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

RESAMPLES = 2000


def machine() -> dict[str, object]:
    """Returns the machine's properties that matter to a reader."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads_per_process": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Returns median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def speedup_interval(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Returns the bootstrapped 95% confidence interval of a speedup.

    Args:
        before, after: seconds of the same blocks.
    """
    draws = np.random.default_rng(0).integers(0, len(before), (RESAMPLES, len(before)))
    sums = np.array([before, after])[:, draws].sum(-1)
    return [round(bound, 4) for bound in np.percentile(sums[0] / sums[1], [2.5, 97.5]).tolist()]


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
