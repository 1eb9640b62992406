"""Where a figure was measured, and how far measurements of it lay apart."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch


def machine() -> dict[str, object]:
    """What a reader must know of the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads_per_process": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, smallest and largest."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
