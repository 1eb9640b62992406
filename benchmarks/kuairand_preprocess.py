"""Measures the memory of preparing KuaiRand, on synthetic logs in the format of kuairand-1k.

The number of events per user is heavy-tailed. The second size shows how memory grows with the files.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl

from benchmarks.harness import Record, measure_cases

EVENTS, USERS, VIDEOS = (10_000_000, 40_000_000), 1_000, 4_000_000


def measure() -> Record:
    """Returns a record for each number of events."""
    return {"records": measure_cases([{"events": events} for events in EVENTS], _measure, "events")}


def _measure(events: int) -> Record:
    with TemporaryDirectory() as directory:
        return {"peak_resident_mb": _prepare(Path(directory) / "raw", Path(directory) / "out", events)}


def _prepare(raw: Path, out: Path, num_events: int) -> int:
    """Returns the megabytes of the preprocessor's peak memory."""
    # A child writes the logs, because the preprocessor's peak memory includes this process's at the fork.
    files = ["tests.commons.datasets.kuairand_files", str(raw), str(num_events), str(USERS), str(VIDEOS)]
    subprocess.run([sys.executable, "-m", *files], check=True)
    prepare = [sys.executable, "-m", "commons.datasets.kuairand_preprocess", "--dataset", "kuairand-1k"]
    process = subprocess.Popen([*prepare, "--raw", str(raw), "--out", str(out)])
    _, status, usage = os.wait4(process.pid, 0)  # getrusage would report the largest of all children
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"the preprocessor ended with exit code {process.returncode}")
    lengths = pl.scan_parquet(out / "sequences.parquet").select(pl.col("items").list.len()).collect()
    if lengths.sum().item() != num_events:
        raise RuntimeError(f"it wrote {lengths.sum().item()} of {num_events} events")
    return round(usage.ru_maxrss * 1024 / 1e6)


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    peaks = [f"{record['peak_resident_mb'] / 1e3:.2f}" for record in figures["records"]]
    return {"kuairand memory": f"{' and '.join(peaks)} GB"}
